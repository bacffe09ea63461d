"""Schedules of attention for a chip of their own."""
