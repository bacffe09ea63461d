"""Benchmarks of chunk_output: workloads, peers and plot."""
