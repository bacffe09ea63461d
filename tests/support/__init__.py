"""Helpers of tests, by topic."""
