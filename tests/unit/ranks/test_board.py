"""The board: messages keep their order, nobody waits to send, and answers reach every rank."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import milepost as mp
from milepost.ranks import server
from milepost.ranks.board import Board, LocalBoard
from milepost.ranks.server import Server, ServerBoard


def boards(num: int) -> list[ServerBoard]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [ServerBoard(Server("127.0.0.1", store.port, store), n, num, "b") for n in range(num)]


def taken(board: Board, num: int) -> list[dict]:
    found: list[dict] = []
    while len(found) < num:
        messages = board.receive(20)
        assert messages
        found += messages
    return found


def test_messages_of_each_rank_come_in_their_order() -> None:
    """Reports are counted per rank: one that overtook another would be taken for it."""
    leader, other = boards(2)
    for number in range(300):
        leader.send({"rank": 0, "n": number})
        other.send({"rank": 1, "n": number})
    other.flush(20)
    found = taken(leader, 600)
    for rank in range(2):
        assert [one["n"] for one in found if one["rank"] == rank] == list(range(300))
    leader.close()
    other.close()


def test_values_of_any_size_come_through() -> None:
    """A table of many files is larger than what the server takes at a time."""
    leader, other = boards(2)
    value = {"text": "x" * 9_000_000, "nan": float("inf"), "bytes": b"\xff"}
    other.send(value)
    assert taken(leader, 1) == [value]
    leader.post("answer", value)
    assert other.read("answer", task="the answer", timeout_s=20) == value
    leader.close()
    other.close()


@pytest.mark.parametrize("kind", ["local", "server"])
def test_answers_wait_for_the_reader_and_the_reader_for_them(kind: str) -> None:
    """Whichever comes first; and what is waited for has a name and an end."""
    leader, reader = boards(2) if kind == "server" else [LocalBoard()] * 2
    with pytest.raises(mp.DeadlineError, match="the claim did not come within"):
        reader.read("k", task="the claim", timeout_s=0.05)
    assert leader.receive(0.05) == []
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.append(reader.read("k", task="the claim", timeout_s=20))
    )
    thread.start()
    leader.post("k", 5)
    thread.join(20)
    assert found == [5]
    assert reader.read("k", task="the claim", timeout_s=1) == 5
    leader.post("bad", error=mp.ExistsError("It is there.", hint="Go."))
    with pytest.raises(mp.ExistsError, match=r"It is there\. Go\."):
        reader.read("bad", task="the claim", timeout_s=20)
    leader.forget("k")
    with pytest.raises(mp.DeadlineError):
        reader.read("k", task="the claim", timeout_s=0.05)
    leader.close()
    reader.close()


def test_what_cannot_be_sent_is_the_error_of_who_sends_it() -> None:
    """And not of the messages around it, or of the rank from then on."""
    leader, other = boards(2)
    other.send({"rank": 1, "n": 1})
    with pytest.raises(mp.UnsupportedStateError):
        other.send({"rank": 1, "n": object()})
    later = {"rank": 1, "n": [2]}
    other.send(later)
    later["n"].append(3)  # type: ignore[attr-defined]
    other.flush(20)
    assert taken(leader, 2) == [{"rank": 1, "n": 1}, {"rank": 1, "n": [2]}]
    leader.close()
    other.close()


def test_the_error_that_ended_the_sending_is_the_one_that_is_raised(monkeypatch) -> None:
    """Whatever it was: nobody may wait for the deadline, or look for a leader that is well."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for error, kind, words in (
        (MemoryError("no memory"), mp.RankFailedError, "MemoryError: no memory"),
        (mp.DeadlineError("It is slow."), mp.DeadlineError, r"^It is slow\.$"),
    ):
        board = ServerBoard(Server("127.0.0.1", store.port, store), 1, 2, "b")

        def put(key: str, message: bytes, error: BaseException = error) -> None:
            del key, message
            raise error

        monkeypatch.setattr(board._server, "put", put)
        board.send({"rank": 1})
        with pytest.raises(kind, match=words):
            board.flush(20)
        with pytest.raises(kind, match=words):
            board.send({"rank": 1})
        board.close()


def test_a_message_without_a_bell_is_there_at_the_deadline_of_the_leader() -> None:
    """It decides then who is late: a rank that has spoken must not be named."""
    leader, second, third = boards(3)
    second._server.next_number("b/bells")  # and died
    third.send({"rank": 2, "n": 1})
    third.flush(20)
    assert leader.receive(0.2) == [{"rank": 2, "n": 1}]
    second._server.put("b/from/1/1", b'[{"rank":1,"n":1}]')  # and died
    found: list[dict] = []
    while not found:  # the bell of what was taken already may come first
        found = leader.receive(0.2)
    assert found == [{"rank": 1, "n": 1}]
    for one in (leader, second, third):
        one.close()


def test_a_rank_that_dies_while_it_sends_hides_no_message(monkeypatch) -> None:
    """It may leave a bell that is never rung, or messages without a bell."""
    monkeypatch.setattr(server, "_BELL_S", 0.05)
    leader, second, third = boards(3)
    second.send({"rank": 1, "n": 1})
    second.flush(20)
    second._server.next_number("b/bells")  # and died
    third._server.put("b/from/2/1", b'[{"rank":2,"n":1}]')  # and died
    leader.send({"rank": 0, "n": 1})
    leader.flush(20)
    found = taken(leader, 3)
    assert sorted(one["rank"] for one in found) == [0, 1, 2]
    second.send({"rank": 1, "n": 2})
    assert taken(leader, 1) == [{"rank": 1, "n": 2}]
    for one in (leader, second, third):
        one.close()


def test_ranks_of_one_machine_are_reached_from_no_other() -> None:
    """Whoever can connect can answer in the name of a rank."""
    opened = server.open_server("127.0.0.1")
    client = server.Server("127.0.0.1", opened.port, opened)
    client.put("a", b"1")
    assert client.take("a", 5) == b"1"
    found = {
        one[4][0]
        for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        if not one[4][0].startswith("127.")
    }
    for address in found:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, opened.port), 5)
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    places = [row.split()[1] for row in rows if row.split()[3] == "0A"]
    assert f"0100007F:{opened.port:04X}" in places
    assert f"00000000:{opened.port:04X}" not in places
    rows = Path("/proc/net/tcp6").read_text().splitlines()[1:]
    assert not [row for row in rows if row.split()[1].endswith(f":{opened.port:04X}")]
