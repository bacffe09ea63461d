"""The CUDA target: `cuda.cu`, and `cuda.py` that loads it."""
