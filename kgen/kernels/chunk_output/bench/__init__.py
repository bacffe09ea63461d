"""Chunk output: its workloads, peers and plot."""
