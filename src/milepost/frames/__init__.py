"""Compressed parts: the codec, and readers that see through it."""
