"""The kernels for Hopper: when there are some, with what tiles, what they are made of, and what is proved of them."""
