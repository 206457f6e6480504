"""A small process that outlives its launcher for as long as it takes to end the workers.

It reads the launcher's pipe: ``+123`` when the process group 123 was started, ``-123`` when it is
gone, ``*word`` when workers are about to be started that carry this mark, ``/word`` when none is
left, ``=path`` for a temporary folder. The kernel closes the pipe when the launcher dies, even of
SIGKILL, and then all that is still listed is killed, and the folder removed. Nothing here depends
on the workers: they may hold the interpreter's lock, be stopped, or have started further processes.

A process that was started by a worker may have left its group (``setsid``). It still has the
worker's environment, with the mark in it, and is found by that.

Started as a plain file by an interpreter without site packages, so it imports nothing of ours.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

__all__ = ["MARK", "kill_marked", "main"]

MARK = "MILEPOST_WORKERS"
"""The variable that carries the mark."""

_PASSES = 5
_DEATH_S = 5.0
_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def main() -> None:
    """Read until the launcher is gone, then kill what is left."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if "--apart" in sys.argv and os.fork() != 0:
        os._exit(0)
    listed: dict[str, set[str]] = {"+": set(), "*": set(), "=": set()}
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # the launcher died while it wrote
        kind, word = line[0], line[1:-1]
        if kind in listed:
            listed[kind].add(word)
        else:
            listed["+" if kind == "-" else "*"].discard(word)
    for group in listed["+"]:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
    for mark in listed["*"]:
        kill_marked(mark)
    for folder in listed["="]:
        shutil.rmtree(folder, ignore_errors=True)


def kill_marked(mark: str) -> None:
    """Kill every process that carries a mark, and wait until none is left, 5 seconds at most.

    Does nothing on systems without ``/proc`` or without ``pidfd``: a number alone may belong to
    another process by the time it is killed.
    """
    deadline_s = time.monotonic() + _DEATH_S
    for _ in range(_PASSES):  # one that is found may have started another just before
        found = _marked(f"{MARK}={mark}".encode())
        for fd in found:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        for fd in found:
            left_s = max(0.0, deadline_s - time.monotonic())
            select.select([fd], [], [], left_s)  # readable once it has ended
            os.close(fd)
        if not found:
            return


def _marked(word: bytes) -> list[int]:
    """Return a descriptor of each live process that has a word in its environment."""
    found: list[int] = []
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return found
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    except FileNotFoundError:
        return found
    for number in numbers:
        try:
            with open(f"/proc/{number}/environ", "rb") as file:  # noqa: PTH123
                if word not in file.read().split(b"\0"):
                    continue
            fd = os.pidfd_open(number)
        except OSError:
            continue  # it has ended, or is not ours
        try:
            with open(f"/proc/{number}/environ", "rb") as file:  # noqa: PTH123
                is_same = word in file.read().split(b"\0")
        except OSError:
            is_same = False
        if is_same:  # read again: the number may have been given away before it was opened
            found.append(fd)
        else:
            os.close(fd)
    return found


if __name__ == "__main__":
    main()
