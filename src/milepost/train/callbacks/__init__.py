"""Callbacks that come with the trainer."""

from __future__ import annotations

from .early_stop import EarlyStop

__all__ = ["EarlyStop"]
