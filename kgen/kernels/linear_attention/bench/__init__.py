"""Benchmarks of linear attention: workloads, peers and plot."""
