"""Checkpoints and whole runs from one place to another: folders and buckets, both ways."""
