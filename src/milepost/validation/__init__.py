"""Checkpoints looked at by processes of their own, while training goes on."""
