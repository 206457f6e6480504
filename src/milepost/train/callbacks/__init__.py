"""Callbacks that come with the trainer."""

from __future__ import annotations

from .early_stop import EarlyStop
from .run_directory_uploader import RunDirectoryUploader

__all__ = ["EarlyStop", "RunDirectoryUploader"]
