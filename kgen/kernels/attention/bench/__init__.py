"""Attention: its workloads, peers and plot."""
