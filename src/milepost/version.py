"""The version of this package. The build reads it from here; imports nothing."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
