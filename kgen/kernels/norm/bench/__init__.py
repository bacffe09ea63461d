"""Benchmarks of norms: workloads, peers and plot."""
