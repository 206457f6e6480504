"""Jobs to launch: scripts in a folder of their own, and programs that launch them.

Everything here is real processes. A worker that must not end by itself waits for ten minutes, so a
launcher that forgets one runs into the timeout of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import LaunchFailedError
from milepost.launch import FailureConfig, LaunchResult, RunConfig, ScalingConfig, launch

HEAD = """
import json, os, pathlib, signal, subprocess, sys, threading, time
from milepost import liveness
rank, attempt = int(os.environ["RANK"]), int(os.environ["MILEPOST_ATTEMPT"])
here = pathlib.Path(__file__).parent
def note(name, text=""):
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").rename(here / name)
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


class Jobs:
    """Jobs in one folder, which is the working folder of the test.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def script(self, body: str) -> str:
        """Write a script; it sees ``rank``, ``attempt``, ``note``, ``wait_for`` and modules."""
        (self.folder / "job.py").write_text(HEAD + textwrap.dedent(body))
        return "job.py"

    def run(self, body: str, *, num: int = 1, **failures: Any) -> LaunchResult:
        """Launch a script from this process."""
        options = {"backoff_s": 0.0, "grace_s": 60.0, **failures}
        return launch(
            self.script(body),
            scaling=ScalingConfig(num_workers=num),
            run=RunConfig(failure_config=FailureConfig(**options)),
        )

    def fail(self, body: str, **options: Any) -> LaunchResult:
        """Launch a script that fails for good."""
        with pytest.raises(LaunchFailedError) as caught:
            self.run(body, **options)
        return caught.value.facts["result"]

    def start(
        self, body: str, *options: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Launch a script from a program of its own."""
        command = [sys.executable, "-m", "milepost.cli.app", "run", *options, self.script(body)]
        return self.started(command, env=env)

    def started(
        self, command: list[str], *, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program, which does not outlive the test."""
        pipe = subprocess.PIPE
        self._started.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(env or {})}
            )
        )
        return self._started[-1]

    def ended(self, process: subprocess.Popen[str]) -> int:
        """Wait for the end of a program, and return its exit code."""
        process.communicate(timeout=60)
        return process.returncode

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds, 30 seconds at most."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def pids(self, *names: str) -> list[int]:
        """Wait until a job has noted numbers, and return them."""
        for name in names:
            self.wait_until((self.folder / name).exists)
        return [int((self.folder / name).read_text()) for name in names]

    def check_gone(self, *numbers: int) -> None:
        """Require that processes end."""
        for number in numbers:
            self.wait_until(lambda number=number: not self.is_alive(number))

    def is_alive(self, pid: int) -> bool:
        """Return whether there is a process that is no zombie."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state not in "ZX"

    def close(self) -> None:
        """Kill the programs that are left."""
        for process in self._started:
            process.kill()
            process.communicate(timeout=60)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.chdir(tmp_path)
    found = Jobs(tmp_path)
    yield found
    found.close()
