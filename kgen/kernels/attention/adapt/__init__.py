"""What models take attention by: kernels for their caches and paddings, and the functions by which they call them."""
