"""What went wrong, and what came first."""

from __future__ import annotations

import json
import signal

import pytest

from milepost.launch.failures import (
    WorkerFailure,
    exit_text,
    first_of,
    log_tail,
    read_failure,
    signature_of,
    write_failure,
)


def failure(rank, at_s, **more):
    given = {"type": "", "message": "", "traceback": "", **more}
    return WorkerFailure(rank=rank, at_s=at_s, **given)


def test_earliest_failure_is_the_cause():
    """On whichever rank."""
    found = first_of([failure(0, 3.0), failure(1, 1.0), failure(2, 2.0)])
    assert [one.rank for one in found] == [1, 2, 0]


def test_kill_is_a_cause_though_it_is_noticed_late():
    """A lost connection is seen at once by a peer; the end of a process a moment later."""
    killed = failure(0, 1.1, code=-signal.SIGKILL)
    lost = failure(1, 1.0, type="ConnectionError", code=1)
    assert first_of([lost, killed])[0] is killed
    much_later = failure(0, 9.0, code=-signal.SIGKILL)
    assert first_of([lost, much_later])[0] is lost


def raise_deep(text):
    raise LookupError(text)


def caught(text):
    with pytest.raises(LookupError) as found:
        raise_deep(text)
    return found.value


def test_what_was_raised_comes_back_whole(tmp_path):
    """Type, text, place, rank; the file is complete whenever it is there."""
    path = tmp_path / "rank-3.error.json"
    assert read_failure(path) is None
    write_failure(path, caught("no such sample"), rank=3, is_final=True)
    found = read_failure(path)
    assert (found.rank, found.is_final) == (3, True)
    assert found.text == "LookupError: no such sample"
    assert "in raise_deep" in found.traceback
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    json.loads(path.read_text())


def test_signature_is_that_of_the_reason(tmp_path):
    """Equal on another rank and at another time; not for another text or place."""
    texts = ["a", "a", "b"]
    for rank, text in enumerate(texts):
        write_failure(tmp_path / str(rank), caught(text), rank=rank)
    first, second, third = (
        signature_of(read_failure(tmp_path / str(rank))) for rank in range(len(texts))
    )
    assert first == second
    assert first != third


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "ended with exit code 1"),
        (-signal.SIGKILL, "SIGKILL (perhaps out of memory"),
        (-signal.SIGABRT, "SIGABRT"),
        (-60, "signal 60"),
        (None, "was not seen to end"),
    ],
)
def test_every_exit_has_words(code, text):
    """A bare -9 says little to most people."""
    assert text in exit_text(code)


def test_tail_of_a_log_is_its_last_lines(tmp_path):
    """Of a log of any length, with any bytes; and nothing if there is none."""
    path = tmp_path / "log"
    assert log_tail(path, num_lines=2) == ""
    path.write_bytes(b"\xff" * 100_000 + b"\none\ntwo\n")
    assert log_tail(path, num_lines=2) == "one\ntwo"
