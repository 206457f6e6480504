"""Ranks of a test are forked, and are what new processes would be."""

from __future__ import annotations

import signal

import pytest

from milepost.errors import DeadlineError
from milepost.testing.ranks import Ranks, run_ranks

TOLD = """
    import atexit, os, pathlib, random, signal, sys
    import numpy
    give(
        hash=hash("text"), argv=sys.argv, name=__name__, folder=os.getcwd(), pid=os.getpid(),
        told=os.environ["TOLD"], secret=os.environ.get("SECRET"), input=sys.stdin.read(),
        signals=[str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)],
        drawn=[random.random(), float(numpy.random.rand()), float(torch.rand(()))],
        rank=os.environ["RANK"], threads=torch.get_num_threads(),
    )
    atexit.register(pathlib.Path(os.environ["TOLD"], f"left-{rank}").touch)
"""


def test_forked_ranks_are_like_new_processes(tmp_path, monkeypatch):
    """What two processes do not share, two ranks must not share, nor what two runs do not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "told")
    first = run_ranks(TOLD, 2, env={"TOLD": str(tmp_path)})
    monkeypatch.delenv("SECRET")
    again = run_ranks(TOLD, 2, env={"TOLD": str(tmp_path)})
    assert [one["secret"] for one in first + again] == ["told", "told", None, None]
    assert [one["rank"] for one in first + again] == ["0", "1", "0", "1"]
    assert first[0]["hash"] != first[1]["hash"]
    for number in range(3):
        assert len({one["drawn"][number] for one in first + again}) == 4
    assert len({one["pid"] for one in first + again}) == 4
    for one in first + again:
        assert (one["name"], one["folder"], one["told"]) == (
            "__main__",
            str(tmp_path),
            str(tmp_path),
        )
        assert (one["input"], one["threads"], len(one["argv"])) == ("", 1, 1)
        assert "default_int_handler" in one["signals"][0]
        assert one["signals"][1] == str(signal.SIG_DFL)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["left-0", "left-1"]


def test_how_ranks_end_is_told():
    """By a signal, by a code, by an error with its traceback; and none is left after a deadline."""
    for ends, code in (("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)):
        (ended,) = Ranks(ends, 1).wait(60)
        assert ended.code == code
    with pytest.raises(AssertionError, match=r"ended with \[1\][\s\S]*ValueError: no"):
        run_ranks("raise ValueError('no')", 1)
    with pytest.raises(DeadlineError, match=r"within 1 s:\nrank 0:\n"):
        Ranks("import time; time.sleep(600)", 1).wait(1)
