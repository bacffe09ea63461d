"""Specs, expression trees, and stand-ins for them."""
