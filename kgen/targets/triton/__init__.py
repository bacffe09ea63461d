"""The Triton target."""
