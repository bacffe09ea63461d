"""The delta of attention backward in CUDA."""
