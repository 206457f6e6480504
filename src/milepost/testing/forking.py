"""Start Python scripts in processes that have loaded torch already; see ``forker``."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError, DeadlineError

__all__ = ["Forked", "forker_of", "start_script"]

_ANSWER_S = 120.0
_REAP_S = 30.0


class Forked:
    """A process that runs a script.

    Args:
        pid: Its number, which is nobody else's until :meth:`wait` has returned.
        forker: What it was forked from.
    """

    def __init__(self, pid: int, forker: _Forker) -> None:
        self.pid = pid
        self._forker = forker
        self._fd = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return its exit code, negative for a signal.

        Raises:
            DeadlineError: It has not ended after so many seconds.
        """
        if self._code is None:
            if not select.select([self._fd], [], [], timeout_s)[0]:
                raise DeadlineError(f"Process {self.pid} did not end within {timeout_s:g} s.")
            os.close(self._fd)
            self._code = self._forker.reap(self.pid)
        return self._code

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        with suppress(DeadlineError):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal. Once it has ended, nothing happens."""
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kill it, if it has not ended, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(_REAP_S)


class _Forker:
    """A process that has loaded what a rank needs, and forks it.

    Args:
        rank: Which one.
    """

    def __init__(self, rank: int) -> None:
        self._name = f"The process that rank {rank} is forked from"
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "milepost.testing.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._is_ready = False
        atexit.register(self._close)

    def start(self, script: Path, *arguments: str, env: Mapping[str, str], log: Path) -> Forked:
        """Run a script as a new interpreter would.

        Args:
            script: The script.
            *arguments: What it finds in ``sys.argv``.
            env: All of its environment.
            log: Where its output is appended, errors included.

        Raises:
            CheckpointError: Nothing can be forked; why is in the output of the tests.
        """
        asked = {"argv": [str(script), *arguments], "log": str(log), "folder": str(Path.cwd())}
        return Forked(self._ask({**asked, "env": dict(env)}), self)

    def reap(self, pid: int) -> int:
        """Return how a process has ended that has."""
        return self._ask({"reap": pid})

    def _ask(self, asked: Mapping[str, object]) -> int:
        with self._lock:
            if not self._is_ready:
                self._hear()
                self._is_ready = True
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # told below
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")
                self._process.stdin.flush()
            return self._hear()

    def _hear(self) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise DeadlineError(f"{self._name} said nothing for {_ANSWER_S:g} s.")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(_REAP_S)
            raise CheckpointError(f"{self._name} has ended with {code}.")
        return int(line)

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.kill()  # a forked child of ours may still hold the pipe
        self._process.wait(_REAP_S)


@functools.cache
def forker_of(rank: int) -> _Forker:
    """Return the process that this rank is forked from, which lives as long as this one.

    Each rank has its own: hashes of text differ from one to the other as they do between any two
    processes, and so does the order of sets.
    """
    return _Forker(rank)


def start_script(
    script: Path, *arguments: str, log: Path, env: Mapping[str, str] | None = None
) -> Forked:
    """Run a script beside this process, which costs it no time to load torch.

    Args:
        script: The script.
        *arguments: What it finds in ``sys.argv``.
        log: Where its output is appended, errors included.
        env: Variables that it gets beside those of this process.
    """
    return forker_of(0).start(script, *arguments, env={**os.environ, **(env or {})}, log=log)
