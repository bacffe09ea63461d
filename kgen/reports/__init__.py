"""Pages about specs, verification results and benchmarks."""
