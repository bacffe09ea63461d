"""How tests run: which, how long, and what is kept of them."""
