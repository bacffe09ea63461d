"""An interpreter of Gluon for the CPU, for emitted kernels."""
