"""Parts of the documentation that are made from code, specs and figures."""
