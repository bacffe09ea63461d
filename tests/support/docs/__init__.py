"""Parts of the documentation that are generated from code, specs and figures."""
