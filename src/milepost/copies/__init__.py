"""Copies of checkpoints on this machine, for whoever needs files."""
