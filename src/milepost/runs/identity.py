"""Who a process is, as far as another one can check later whether it still lives."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "this_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/sys/class/dmi/id/product_uuid"))
_MACHINE_ID = re.compile(r"(?!(?:0+|f+)$)[0-9a-f]{32}")
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
        machine_id: Tells machines apart that bear one name; empty where it is not known. A digest,
            since what it is made of should not be handed on.
    """

    host: str
    pid: int
    boot_id: str
    process_start: str = ""
    machine_id: str = ""


def this_process() -> Identity:
    """Return the identity of the calling process."""
    pid = os.getpid()
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Identity(socket.gethostname(), pid, boot_id, process_start(pid), machine_id())


def machine_id() -> str:
    """Return what tells this machine from others, or ``""`` if nothing does.

    The number that the system was given when it was installed and that of the hardware, as far as
    they can be read. Both, since the former may be part of an image that many machines start from.
    """
    known = [found for found in map(_read_machine_id, _MACHINE_IDS) if found]
    if not known:
        return ""
    return hashlib.sha256(" ".join(("milepost", *known)).encode()).hexdigest()[:32]


def _read_machine_id(path: Path) -> str:
    """Return the 32 hex digits in a file; one that is missing, secret or not filled in is none."""
    try:
        text = path.read_text(encoding="ascii").strip().lower().replace("-", "")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if _MACHINE_ID.fullmatch(text) else ""


def process_start(pid: int) -> str:
    """Return the start mark of a process, or ``""`` if there is none here that can be looked at."""
    state, *rest = _status(pid) or ["X"]
    try:
        return "" if state in ("Z", "X") else f"{rest[18]}@{_PID_NAMESPACE.readlink()}"
    except FileNotFoundError:
        return ""


def _status(pid: int) -> list[str]:
    """Return what the system says of a process behind its name, or nothing."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError, PermissionError):
        return []
    # The name of the program, in brackets, may hold spaces and brackets itself.
    return status.rpartition(")")[2].split()


def _is_missing(pid: int) -> bool:
    """Return whether there is no process of a number, also none that is hidden from this user."""
    if type(pid) is not int or pid <= 0:  # a record may say anything, and these are groups
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def is_gone(other: Identity, me: Identity) -> bool:
    """Return whether ``me`` can prove that ``other`` has ended.

    A name proves nothing: a pod keeps its name when it moves to another machine. It must be known
    that both run, or ran, on one machine. Then another start of it is proof. Within one start,
    which is told by a random number of its own, the process must be missing from the very table of
    processes that it was in, or its number must belong to a younger process. Where ``/proc`` shows
    nothing of a process it may only be hidden, as those of other users are on many clusters: that
    it is missing is then for the system to say, which does not send it a signal.
    """
    if not other.boot_id or not me.boot_id:
        return False
    if other.boot_id != me.boot_id:
        is_same_machine = bool(other.machine_id) and other.machine_id == me.machine_id
        has_name = other.host == me.host and other.host not in _NAMELESS_HOSTS
        return is_same_machine and has_name
    namespace = other.process_start.partition("@")[2]
    if not namespace or namespace != me.process_start.partition("@")[2]:
        return False
    is_hidden = not _status(other.pid) and not _is_missing(other.pid)
    return not is_hidden and process_start(other.pid) != other.process_start
