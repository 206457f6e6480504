"""Who a process is, as far as another one can check later whether it still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "this_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NAMELESS_HOSTS = frozenset({"", "localhost", "localhost.localdomain"})


@dataclass(frozen=True, slots=True)
class Identity:
    """One process on one machine.

    Attributes:
        host: Name of the machine.
        pid: Process number.
        boot_id: Changes with every start of the machine; empty where it cannot be read.
        process_start: When the process started, in clock ticks since the machine did, and the
            process namespace it lives in. A number that was given out again has another one.
    """

    host: str
    pid: int
    boot_id: str
    process_start: str = ""


def this_process() -> Identity:
    """Return the identity of the calling process."""
    pid = os.getpid()
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Identity(socket.gethostname(), pid, boot_id, process_start(pid))


def process_start(pid: int) -> str:
    """Return the start mark of a process, or ``""`` if there is no such process here."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        namespace = _PID_NAMESPACE.readlink()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return ""
    # The name of the program, in brackets, may hold spaces and brackets itself.
    state, *rest = status.rpartition(")")[2].split()
    return "" if state in ("Z", "X") else f"{rest[18]}@{namespace}"


def is_gone(other: Identity, me: Identity) -> bool:
    """Return whether ``me`` can prove that ``other`` has ended.

    Another machine, or a name that many machines bear, proves nothing. Another start of this
    machine proves it. Within one start, the process must be missing from the very table of
    processes that it was in, or its number must belong to a younger process.
    """
    if other.host != me.host or other.host in _NAMELESS_HOSTS:
        return False
    if not other.boot_id or not me.boot_id:
        return False
    if other.boot_id != me.boot_id:
        return True
    namespace = other.process_start.partition("@")[2]
    if not namespace or namespace != me.process_start.partition("@")[2]:
        return False
    return process_start(other.pid) != other.process_start
