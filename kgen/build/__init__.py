"""`kgen build`: emitted kernels as machine code, in packages that need neither a compiler nor Triton."""
