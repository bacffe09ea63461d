"""GPU runs of emitted files beyond `kgen verify`, and their reports."""
