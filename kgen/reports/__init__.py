"""Pages of specs, of what was verified and of what was measured."""
