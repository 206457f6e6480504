"""What is known of a process that has ended."""

from __future__ import annotations

import signal
from pathlib import Path

__all__ = ["exit_text", "log_tail"]

_TAIL_BYTES = 8192


def exit_text(code: int | None) -> str:
    """Say how a process ended."""
    if code is None:
        return "was not seen to end"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    more = {"SIGKILL": " (perhaps out of memory: look at dmesg)", "SIGBUS": " (perhaps /dev/shm)"}
    return f"was killed by {name}{more.get(name, '')}"


def log_tail(path: Path, *, num_lines: int) -> str:
    """Return the last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])
