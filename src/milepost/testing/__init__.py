"""Helpers for tests of stores, and of programs that save through them."""

from __future__ import annotations

from .conformance import StoreConformance
from .faults import Crash, Fault, FaultStore
from .proxy import FaultProxy, fault_proxy
from .saver import read_key, save_files, write_key

__all__ = [
    "Crash",
    "Fault",
    "FaultProxy",
    "FaultStore",
    "StoreConformance",
    "fault_proxy",
    "read_key",
    "save_files",
    "write_key",
]
