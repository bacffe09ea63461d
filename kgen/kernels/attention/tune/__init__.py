"""Search for tile shapes: enumerate, compile, time, keep the fastest."""
