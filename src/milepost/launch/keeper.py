"""A small process that outlives its launcher for as long as it takes to end the workers.

It reads the launcher's pipe: ``+123`` when the process group 123 was started, ``-123`` when it is
gone. The kernel closes the pipe when the launcher dies, even of SIGKILL, and then every group that
is still listed is killed. Nothing here depends on the workers: they may hold the interpreter's
lock, be stopped, or have started further processes.

Started as a plain file by an interpreter without site packages, so it imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def main() -> None:
    """Read until the launcher is gone, then kill what is left."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # the launcher died while it wrote
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself


if __name__ == "__main__":
    main()
