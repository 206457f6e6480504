"""Processes that are started and must not be left behind, and functions that they run."""
