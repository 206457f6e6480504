"""Several ranks on one machine, for tests: each a process of its own in one gloo group.

They are forked from processes that have loaded torch, which takes a new one seconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeadlineError
from ..launch.environment import HeldPort
from .forking import Forked, forker_of

__all__ = ["RankResult", "Ranks", "run_ranks"]

_FRAME = """
import json, os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
results = {{}}
def give(**values):
    results.update(values)
    with open({results!r} + f"/rank-{{rank}}.json", "w") as file:
        json.dump(results, file)
{body}
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended.

    Attributes:
        code: Its exit code; negative for a signal.
        output: What it printed, errors included.
        given: What it passed to ``give``.
    """

    code: int
    output: str
    given: dict[str, Any]


class Ranks:
    """Ranks that are running.

    Args:
        body: Python source that each rank runs inside the group. It sees ``rank``,
            ``world_size``, ``dist``, ``torch`` and ``give(**values)``, whose values must be JSON.
        num_ranks: How many.
        env: More environment variables.
    """

    def __init__(self, body: str, num_ranks: int, *, env: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="milepost-ranks-")
        source = _FRAME.format(results=self._folder.name, body=textwrap.dedent(body))
        script = Path(self._folder.name) / "rank.py"
        script.write_text(source)
        self._port = HeldPort()
        self._processes: list[Forked] = []
        self._logs = [Path(self._folder.name) / f"rank-{rank}.log" for rank in range(num_ranks)]
        forkers = [forker_of(rank) for rank in range(num_ranks)]
        for rank, forker in enumerate(forkers):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port.number),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            self._processes.append(forker.start(script, env=variables, log=self._logs[rank]))

    def wait(self, timeout_s: float = 120.0) -> list[RankResult]:
        """Wait for all ranks to end; at the deadline they are killed.

        Raises:
            DeadlineError: They did not end in time; it shows what they printed.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            codes = [
                process.wait(max(0.1, deadline_s - time.monotonic())) for process in self._processes
            ]
            return [self._result(rank, code) for rank, code in enumerate(codes)]
        except DeadlineError:
            for process in self._processes:
                process.kill()
            said = "\n".join(f"rank {n}:\n{log.read_text()}" for n, log in enumerate(self._logs))
            raise DeadlineError(f"The ranks did not end within {timeout_s:g} s:\n{said}") from None
        finally:
            self._port.close()
            self._folder.cleanup()

    def _result(self, rank: int, code: int) -> RankResult:
        given = Path(self._folder.name) / f"rank-{rank}.json"
        values = json.loads(given.read_text()) if given.exists() else {}
        return RankResult(code, self._logs[rank].read_text(), values)


def run_ranks(
    body: str,
    num_ranks: int,
    *,
    timeout_s: float = 120.0,
    codes: Sequence[int] | None = None,
    env: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run Python source on several ranks and return what each gave.

    Args:
        body: See :class:`Ranks`.
        num_ranks: How many.
        timeout_s: How long they may take, in seconds.
        codes: The exit codes that are right; zeros by default.
        env: More environment variables.

    Raises:
        AssertionError: A rank ended in another way; it shows what the ranks printed.
    """
    results = Ranks(body, num_ranks, env=env).wait(timeout_s)
    found = [result.code for result in results]
    if found != list(codes or [0] * num_ranks):
        said = "\n".join(f"rank {n}:\n{result.output}" for n, result in enumerate(results))
        raise AssertionError(f"The ranks ended with {found}:\n{said}")
    return [result.given for result in results]
