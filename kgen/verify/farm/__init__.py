"""Execution of tasks in processes of this machine (`tasks.Here`), or on a Ray cluster
(`nodes.Farm`).
"""
