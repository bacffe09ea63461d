"""The CuTe DSL target: kernels for one architecture each, with its copy engine and its tensor cores."""
