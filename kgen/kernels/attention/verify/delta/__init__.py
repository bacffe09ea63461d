"""The delta of attention backward: a part of attention that a target may have alone."""
