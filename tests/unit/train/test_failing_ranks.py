"""Ranks that fail: the others are told, and wait for nobody who is gone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import milepost as mp
from milepost.ranks.server import Server
from milepost.ranks.team import StoreTeam
from milepost.train.alarm import Alarm
from milepost.train.group import Group
from milepost.train.stopping import Stopping

Body = Callable[[StoreTeam], Any]


def on_ranks(*bodies: Body) -> list[Any]:
    """Run each body as a rank in a thread; return what it returned or raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = Server("127.0.0.1", store.port, store)
    ended: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            ended[rank] = bodies[rank](StoreTeam(server, rank, len(bodies), "team"))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ended


def ask(team: StoreTeam) -> Any:
    return team.collect("save", lambda: team.rank, timeout_s=600)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_gave_up_is_not_waited_for(failing: int) -> None:
    """Whatever the others ask next, they get its error at once."""

    def give_up(team: StoreTeam) -> Any:
        team.give_up(mp.NoSpaceError("The disk is full."))

    ended = on_ranks(*(give_up if rank == failing else ask for rank in range(3)))
    if failing == 0:
        # The leader posts no more than its own error, and that is told to the others as it is.
        assert all(isinstance(one, mp.NoSpaceError) for one in ended[1:])
    else:
        others = [one for rank, one in enumerate(ended) if rank != failing]
        assert all(isinstance(one, mp.RankFailedError) for one in others)
        assert all(f"rank {failing}: NoSpaceError: The disk is full." in str(o) for o in others)


def test_a_leader_stops_waiting_for_a_rank_that_is_gone() -> None:
    """The wait is in one thread, and it is ended from another."""

    def leader(team: StoreTeam) -> Any:
        answers: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(mp.RankFailedError) as caught:
                ask(team)
            answers.append(caught.value)

        thread = threading.Thread(target=wait)
        thread.start()
        while team._awaited is None:
            thread.join(0.01)
        team.stop_waiting(OSError("it broke"))
        thread.join(30)
        return answers[0]

    (error, _) = on_ranks(leader, lambda _team: None)
    assert "rank 1: DeadlineError: Rank 1 did not answer any more" in str(error)


def test_only_the_first_note_stands() -> None:
    """Two ranks that fail at once agree on which of them was first."""
    found = on_ranks(*[lambda team: team.note_first("failed", str(team.rank))] * 3)
    assert len(set(found)) == 1
    assert found[0] in ("0", "1", "2")


def test_a_leader_that_is_gone_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes a minute, and whoever asks then is about to end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = Server("127.0.0.1", store.port, None)
    server.set("a", b"1")
    del store
    gc.collect()
    with pytest.raises(mp.RankFailedError):
        server.get("b", 5)
    monkeypatch.setattr(server, "_connect", lambda: pytest.fail("it looked"))
    with pytest.raises(mp.RankFailedError):
        server.set("a", b"1")


def report(team: StoreTeam, error: Exception, *, after: threading.Event | None = None) -> Any:
    alarm = Alarm(Group(team, timeout_s=30, is_ours=False))
    alarm.listen()
    try:
        if after is not None:
            assert after.wait(30)
        told = alarm.report(error)
        return told, alarm.is_rank_gone(told)
    finally:
        alarm.stop()


def test_what_follows_from_a_failure_names_the_rank_that_failed_first() -> None:
    """Torch raises a bare RuntimeError when a rank is gone; other errors are the rank's own."""
    told = threading.Event()

    def first(team: StoreTeam) -> Any:
        found = report(team, KeyError("x"))
        told.set()
        return found

    follows, own = RuntimeError("Connection closed by peer"), ValueError("mine")
    ended = on_ranks(
        lambda team: report(team, follows, after=told),
        first,
        lambda team: report(team, own, after=told),
    )
    (named, _), (same, _), (kept, _) = ended
    assert isinstance(named, mp.RankFailedError)
    assert named.facts["ranks"] == [1]
    assert named.facts["errors"] == {1: "KeyError"}
    assert named.__cause__ is follows
    assert type(same) is KeyError
    assert kept is own
    assert any("Rank 1 failed first: KeyError" in note for note in kept.__notes__)


def test_ranks_that_listen_are_there_and_others_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do meanwhile does not matter: a thread answers."""
    monkeypatch.setattr("milepost.train.alarm._ANSWER_S", 1.0)
    done = threading.Event()

    def busy(team: StoreTeam) -> Any:
        alarm = Alarm(Group(team, timeout_s=30, is_ours=False))
        alarm.listen()
        assert done.wait(30)
        alarm.stop()

    def fails(team: StoreTeam) -> Any:
        try:
            return report(team, KeyError("x"))
        finally:
            done.set()

    error, is_gone = on_ranks(fails, busy)[0]
    assert not is_gone
    done.clear()
    error, is_gone = on_ranks(fails, busy, lambda _team: None)[0]
    assert is_gone
    assert any("Rank 2 does not answer" in note for note in error.__notes__)


class Asked:
    """Signals that a test makes up."""

    grace_s = seconds_left = 30.0

    def __init__(self, received: int | None) -> None:
        self.received = received


def test_one_rank_that_leaves_an_evaluation_takes_the_others_along() -> None:
    """Also those that were through, and those that got no signal; and then all know the signal."""
    noted = threading.Event()

    def asked(team: StoreTeam) -> Any:
        stopping = Stopping(Group(team, timeout_s=30, is_ours=False), Asked(10))  # type: ignore[arg-type]
        is_cut = stopping.should_cut_off()
        noted.set()
        return is_cut, stopping.agree_on_cut(is_cut=is_cut), stopping.number

    def sees_it(team: StoreTeam) -> Any:
        stopping = Stopping(Group(team, timeout_s=30, is_ours=False), Asked(None))  # type: ignore[arg-type]
        assert noted.wait(30)
        is_cut = stopping.should_cut_off()
        return is_cut, stopping.agree_on_cut(is_cut=is_cut), stopping.number

    def is_through(team: StoreTeam) -> Any:
        stopping = Stopping(Group(team, timeout_s=30, is_ours=False), None)
        return False, stopping.agree_on_cut(is_cut=False), stopping.number

    assert on_ranks(asked, sees_it, is_through) == [
        (True, True, 10),
        (True, True, 10),
        (False, True, 10),
    ]
    assert on_ranks(is_through, is_through) == [(False, False, None)] * 2
