"""An interpreter of Gluon for the CPU, which runs the emitted kernels in Gluon."""
