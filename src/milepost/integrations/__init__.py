"""Milepost inside of other frameworks. Each file imports its own, and is imported by name."""
