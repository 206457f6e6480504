"""Ranks that agree: one result or one error on all of them, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import milepost as mp
from milepost.ranks.server import Server
from milepost.ranks.solo import Solo, Team
from milepost.ranks.team import StoreTeam

Body = Callable[[Team], Any]


def on_ranks(*bodies: Body) -> list[Any]:
    """Run each body as a rank in a thread; return what it returned or raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = Server("127.0.0.1", store.port, store)
    ended: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        team = StoreTeam(server, rank, len(bodies), "team")
        try:
            ended[rank] = bodies[rank](team)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ended


def fail(error: Exception) -> Any:
    raise error


def test_the_leaders_result_reaches_every_rank() -> None:
    """Whatever JSON cannot hold by itself comes through too."""
    value = {"a": (1, 2.5), "b": b"\x00\xff", "c": float("inf")}

    def body(team: Team) -> Any:
        work = (lambda: value) if team.rank == 0 else (lambda: fail(AssertionError()))
        return team.lead("decide", work, timeout_s=20)

    assert on_ranks(body, body, body) == [value] * 3


def test_the_leaders_error_is_the_same_on_every_rank() -> None:
    """With its class, so that callers can tell what it is."""

    def body(team: Team) -> Any:
        error = mp.ExistsError("It is there.", safe="All is safe.", hint="Go.")
        return team.lead("decide", lambda: fail(error), timeout_s=20)

    for ended in on_ranks(body, body):
        assert type(ended) is mp.ExistsError
        assert str(ended) == "It is there. All is safe. Go."


def test_every_rank_gets_every_result_in_order() -> None:
    """Many times in a row, with old messages taken back."""

    def body(team: Team) -> Any:
        return [
            team.collect("count", lambda n=n: [team.rank, n], timeout_s=20)  # type: ignore[misc]
            for n in range(200)
        ]

    for ended in on_ranks(body, body, body):
        assert ended == [[[rank, n] for rank in range(3)] for n in range(200)]


def test_one_ranks_error_is_one_summary_on_all() -> None:
    """The rank that failed keeps its own error as the cause."""

    def good(team: Team) -> Any:
        return team.collect("write", lambda: 1, timeout_s=20)

    def bad(team: Team) -> Any:
        return team.collect("write", lambda: fail(ZeroDivisionError("by hand")), timeout_s=20)

    ended = on_ranks(good, bad, good)
    assert {type(one) for one in ended} == {mp.RankFailedError}
    assert len({str(one) for one in ended}) == 1
    assert "rank 1: ZeroDivisionError: by hand" in str(ended[0])
    assert ended[0].facts["errors"] == {1: "ZeroDivisionError"}
    assert isinstance(ended[1].__cause__, ZeroDivisionError)


def test_the_same_error_on_all_ranks_is_itself() -> None:
    """A checkpoint that fits nobody is no fault of a rank."""

    def body(team: Team) -> Any:
        error = mp.MismatchError("Too large.", report=5)
        return team.collect("compare", lambda: fail(error), timeout_s=20)

    for ended in on_ranks(body, body):
        assert type(ended) is mp.MismatchError
        assert ended.facts == {"report": 5}


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others must not wait for longer than they were told to."""
    monkeypatch.setattr("milepost.ranks.team._FOLLOWER_MARGIN_S", 0.2)

    def body(team: Team) -> Any:
        return team.collect("save", lambda: 1, timeout_s=0.3)

    def nobody(team: Team) -> Any:
        return "absent"

    bodies: list[Body] = [body, body]
    bodies[absent] = nobody
    ended = on_ranks(*bodies)
    error = ended[1 - absent]
    assert type(error) is mp.DeadlineError
    assert f"Rank {absent} did not come" in str(error)


def test_ranks_that_do_different_things_are_told() -> None:
    """One that saves while another restores would take the other's messages for its own."""

    def saves(team: Team) -> Any:
        return team.collect("save", lambda: 1, timeout_s=5)

    def restores(team: Team) -> Any:
        return team.collect("restore", lambda: 1, timeout_s=5)

    for ended in on_ranks(saves, restores):
        assert type(ended) is mp.RankFailedError
        assert "do not do the same" in str(ended)


def test_threads_of_one_rank_do_not_disturb_each_other() -> None:
    """A save in the background waits while the training goes through the same server."""

    def body(team: Team) -> Any:
        found: list[Any] = []
        behind = team.for_thread("behind")

        def wait() -> None:
            found.append(behind.collect("slow", lambda: team.rank, timeout_s=20))

        thread = threading.Thread(target=wait)
        if team.rank == 0:
            thread.start()
        quick = [team.collect("quick", lambda: 7, timeout_s=20) for _ in range(20)]
        if team.rank != 0:
            thread.start()
        thread.join()
        return quick[-1], found

    assert on_ranks(body, body) == [([7, 7], [[0, 1]])] * 2


def test_one_process_is_a_team_of_one() -> None:
    """It does the same work without a server, and raises its own errors."""
    team = Solo()
    assert team.lead("decide", lambda: 5, timeout_s=0) == 5
    assert team.collect("count", lambda: 6, timeout_s=0) == [6]
    with pytest.raises(KeyError):
        team.collect("fail", lambda: fail(KeyError("x")), timeout_s=0)


def test_the_leader_makes_one_answer_of_all_results() -> None:
    """It is all that comes back."""

    def body(team: Team) -> Any:
        conclude = sum if team.rank == 0 else (lambda _: fail(AssertionError()))
        return [
            team.gather("add", lambda n=n: team.rank + n, conclude, timeout_s=20)  # type: ignore[misc]
            for n in range(3)
        ]

    assert on_ranks(body, body, body) == [[3, 6, 9]] * 3
    assert Solo().gather("add", lambda: 5, sum, timeout_s=1) == 5


def test_what_the_leader_finds_wrong_with_the_results_is_everybodys_error() -> None:
    """With its class, and the next task works."""

    def body(team: Team) -> Any:
        error = mp.MismatchError("They differ.", safe="All is safe.", hint="Go.")
        with pytest.raises(mp.MismatchError, match=r"They differ\."):
            team.gather("compare", lambda: team.rank, lambda _: fail(error), timeout_s=20)
        return team.gather("add", lambda: 1, sum, timeout_s=20)

    assert on_ranks(body, body) == [2, 2]


def test_an_error_of_this_rank_keeps_its_facts_and_its_cause() -> None:
    """Where all ranks fail alike, each has more to say of its own error than was sent around."""

    def body(team: Team) -> Any:
        def work() -> int:
            raise mp.MissingError("It is gone.", path=f"of rank {team.rank}") from KeyError("x")

        with pytest.raises(mp.MissingError) as caught:
            team.gather("look", work, sum, timeout_s=20)
        return caught.value.facts["path"], type(caught.value.__cause__)

    assert on_ranks(body, body) == [("of rank 0", KeyError), ("of rank 1", KeyError)]


def test_messages_may_be_longer_than_the_server_takes_at_once() -> None:
    """The manifest of many terabytes is one; both ways, and nothing of them stays."""
    long = bytes(range(256)) * 40_000  # 10 MB, and more as text

    def body(team: Team) -> Any:
        found = team.gather("send", lambda: long, lambda all_of: all_of[1], timeout_s=60)
        assert found == long
        assert team.lead("send", lambda: long[::-1], timeout_s=60) == long[::-1]
        for _ in range(70):
            team.collect("go on", lambda: 1, timeout_s=60)
        return sorted(team._server._pieces)  # type: ignore[union-attr]

    ended = on_ranks(body, body)
    assert ended == [[], []]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    """And not a wait of all the others until the deadline."""

    def body(team: Team) -> Any:
        with pytest.raises(mp.CheckpointError, match="rank 1: UnsupportedStateError"):
            team.collect("send", object if team.rank == 1 else int, timeout_s=60)
        with pytest.raises(mp.UnsupportedStateError):
            team.gather("conclude", lambda: 1, lambda _: object(), timeout_s=60)
        with pytest.raises(mp.UnsupportedStateError):
            team.lead("lead", object, timeout_s=60)
        return "ok"

    assert on_ranks(body, body) == ["ok", "ok"]
