"""Delta of attention backward, a part of attention that a target may implement separately."""
