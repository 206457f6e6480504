"""What the cases share: a fresh process without starting one, and programs that really are one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def scramble() -> Callable[[], None]:
    """Put every generator where a new process, seeded in another way, would have it."""

    def scramble_now() -> None:
        random.seed(987)
        np.random.seed(987)
        torch.manual_seed(987)
        torch.rand(3), np.random.rand(3), random.random()

    return scramble_now


class Program:
    """A program that was started."""

    def __init__(self, ask: Callable[[dict], dict], pid: int, out: Path, err: Path) -> None:
        self._ask = ask
        self.pid = pid
        self._files = (out, err)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return exit code, output and errors."""
        code = self._ask({"wait": self.pid})["code"]
        out, err = (path.read_text() for path in self._files)
        return code, out, err


@pytest.fixture(scope="session")
def _ask_maker() -> Iterator[Callable[[dict], dict]]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    maker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("process_maker.py"))],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(order: dict) -> dict:
        maker.stdin.write(json.dumps(order) + "\n")
        maker.stdin.flush()
        return json.loads(maker.stdout.readline())

    yield ask
    maker.stdin.close()
    assert maker.wait(30) == 0
    maker.stdout.close()


@pytest.fixture(scope="session")
def start_in(_ask_maker: Callable[[dict], dict]) -> Callable[..., Program]:
    """Start a program in a folder."""
    count = [0]

    def start(folder: Path, text: str, *arguments: str) -> Program:
        count[0] += 1
        script, out, err = (folder / f"{count[0]}.{kind}" for kind in ("py", "out", "err"))
        script.write_text(text)
        order = {"folder": str(folder), "script": str(script), "arguments": arguments}
        pid = _ask_maker({**order, "out": str(out), "err": str(err)})["pid"]
        return Program(_ask_maker, pid, out, err)

    return start


@pytest.fixture
def start_script(start_in: Callable[..., Program], tmp_path: Path) -> Callable[..., Program]:
    """Start a program in the test's folder."""
    return lambda text, *arguments: start_in(tmp_path, text, *arguments)


@pytest.fixture
def run_script(start_script: Callable[..., Program]) -> Callable[..., tuple[int, str, str]]:
    """Run a program to its end; return its exit code, output and errors."""
    return lambda text, *arguments: start_script(text, *arguments).end()
