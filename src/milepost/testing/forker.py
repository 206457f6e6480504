"""The process that a test's ranks are forked from, so that none has to load torch: ``forking``.

It reads a line of JSON for each request and answers with a line: first ``0`` once it is ready, then
the number of a process that it has started, or how one has ended. It has no threads, and asks for
nothing that starts any: what is forked begins as a new interpreter would, with more of it loaded.
When nobody is left to ask it kills what it has started, and ends.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # the first optimizer loads it
    "torchmetrics",
    "milepost.train",
    "milepost.checkpointer",
)


def _serve() -> dict[str, Any] | None:
    """Do what is asked until nobody asks; in a child, return what it shall be."""
    started: set[int] = set()
    _tell(0)
    for line in sys.stdin:
        asked = json.loads(line)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            started.remove(asked["reap"])
            _tell(os.waitstatus_to_exitcode(status))
        else:
            pid = os.fork()
            if not pid:
                return asked  # type: ignore[no-any-return] # what the other end has sent
            started.add(pid)
            _tell(pid)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    return None


def _tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _become(asked: dict[str, Any]) -> None:
    """Make this process what a new one would be."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    sys.argv = asked["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    # Whoever drew from them, and whoever forgets to seed them, gets other numbers each time.
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, to all of the group
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded stays, and its pages stay shared
    asked = _serve()
    if asked is not None:
        _become(asked)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
