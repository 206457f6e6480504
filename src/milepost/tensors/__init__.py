"""Torch tensors <-> dense bytes with a name."""
