"""Benchmarks of attention: workloads, peers and plot."""
