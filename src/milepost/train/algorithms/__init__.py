"""Algorithms that come with the trainer."""

from __future__ import annotations

from .ema import EMA

__all__ = ["EMA"]
