"""Runs of emitted files on a GPU beyond `kgen verify`, and the reports of them."""
