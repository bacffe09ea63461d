"""Norms: their workloads, peers and plot."""
