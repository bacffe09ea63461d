"""What is proved of attention kernels."""
