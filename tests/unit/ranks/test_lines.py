"""Lines between ranks: bytes arrive as they are, and whoever is not there is told of by name."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing

import pytest

from milepost.errors import DeadlineError, RankFailedError, UsageError
from milepost.ranks.lines import Desk, Line, call


def calling(address, rank, body, **options):
    """Run a rank in a thread; return the thread and what became of it."""
    ended = []

    def run() -> None:
        try:
            with closing(call(address, rank=rank, call_s=10, timeout_s=10, **options)) as line:
                ended.append(body(line))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_bytes_go_both_ways_whole():
    """Large ones too, in several parts, and empty ones."""
    data = bytes(range(256)) * 40_000

    def body(line: Line) -> bytes:
        found = bytes(line.receive())
        line.send(memoryview(data), b"end")
        assert not line.receive()
        return found

    with closing(Desk("127.0.0.1")) as desk:
        ranks = {rank: calling(desk.address, rank, body) for rank in (2, 1)}
        lines = desk.take_calls(3, call_s=10, timeout_s=10)
        assert sorted(lines) == [1, 2]
        for rank, line in lines.items():
            line.send(str(rank).encode())
        for line in lines.values():
            assert bytes(line.receive()) == data + b"end"
            line.finish()
        for rank, (thread, ended) in ranks.items():
            thread.join(10)
            assert ended == [str(rank).encode()]


def test_an_error_comes_out_at_the_other_end():
    """As what it was."""
    with closing(Desk("localhost")) as desk:
        thread, _ = calling(
            desk.address, 1, lambda line: line.send_error("give", UsageError("no."), rank=1)
        )
        line = desk.take_calls(2, call_s=10, timeout_s=10)[1]
        with pytest.raises(UsageError, match="no"):
            line.receive()
        thread.join(10)
        line.finish()


def test_a_rank_that_hangs_up_or_says_nothing_is_named():
    """At once, or at the deadline."""
    with closing(Desk("127.0.0.1")) as desk:
        thread, _ = calling(desk.address, 1, lambda line: None)
        line = desk.take_calls(2, call_s=10, timeout_s=10)[1]
        with pytest.raises(RankFailedError, match="Rank 1 cannot be reached"):
            line.receive()
        line.finish()
        thread.join(10)
        held = threading.Event()
        thread, _ = calling(desk.address, 1, lambda line: held.wait(10))
        line = desk.take_calls(2, call_s=10, timeout_s=0.05)[1]
        with pytest.raises(DeadlineError, match="Rank 1 sent or took nothing"):
            line.receive()
        held.set()
        thread.join(10)
        line.close()


def test_ranks_that_do_not_call_are_named():
    """And those that did are let go."""
    with closing(Desk("127.0.0.1")) as desk:
        thread, ended = calling(desk.address, 2, lambda line: line.receive())
        with pytest.raises(DeadlineError, match="Rank 1, 3 did not call"):
            desk.take_calls(4, call_s=0.3, timeout_s=10)
        thread.join(10)
        assert isinstance(ended[0], RankFailedError)


def test_strangers_are_not_let_in():
    """Whoever finds the port must not be taken for a rank, and must not stop the save."""
    with closing(Desk("127.0.0.1")) as desk:
        host, port, token = desk.address
        silent = socket.create_connection((host, port))
        silent.close()
        for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" + (2).to_bytes(8, "little") + b"{}"):
            stranger = socket.create_connection((host, port))
            stranger.sendall(first)
            stranger.close()
        liar, _ = calling([host, port, "0" * 64], 1, lambda line: line.receive())
        huge = socket.create_connection((host, port))
        huge.sendall(b"\x00" + (1 << 39).to_bytes(8, "little"))
        thread, ended = calling([host, port, token], 1, lambda line: bytes(line.receive()))
        line = desk.take_calls(2, call_s=20, timeout_s=10)[1]
        line.send(json.dumps("ours").encode())
        thread.join(10)
        liar.join(10)
        huge.close()
        assert ended == [b'"ours"']
        line.finish()


def test_a_stranger_that_drips_is_given_no_more_time(monkeypatch):
    """A byte now and then must not keep the ranks waiting, however many there are to come."""
    monkeypatch.setattr("milepost.ranks.lines._HELLO_S", 0.4)
    with closing(Desk("127.0.0.1")) as desk:
        host, port, _ = desk.address
        # Of the right length, so that only the clock can tell.
        hello = b"\x00" + (72).to_bytes(8, "little") + b"x" * 72
        sent = []

        def drip() -> None:
            with socket.create_connection((host, port)) as stranger:
                stranger.settimeout(0.1)
                for number in range(len(hello)):
                    try:
                        stranger.sendall(hello[number : number + 1])
                        sent.append(number)
                        if not stranger.recv(1):
                            return
                    except TimeoutError:
                        continue
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(DeadlineError, match="Rank 1 did not call"):
            desk.take_calls(2, call_s=1, timeout_s=10)
        dripping.join(30)
        assert len(sent) < len(hello)


@pytest.mark.parametrize("first", [b"\x00", b"\x01"])
def test_nothing_that_a_stranger_says_is_looked_into(first, monkeypatch):
    """Its bytes are compared and not decoded, however they are made."""
    monkeypatch.setattr("milepost.ranks.lines.Outcome.from_bytes", pytest.fail)
    with closing(Desk("127.0.0.1")) as desk:
        host, port, token = desk.address
        bodies = [b"\xff" * 72, "é".encode() * 36, b"[" * 4000, b'["x", 1e999]', token.encode()]
        strangers = []
        for body in bodies:
            strangers.append(socket.create_connection((host, port)))
            strangers[-1].sendall(first + len(body).to_bytes(8, "little") + body)
        thread, ended = calling(desk.address, 1, lambda line: bytes(line.receive()))
        line = desk.take_calls(2, call_s=20, timeout_s=10)[1]
        line.send(b"ours")
        thread.join(10)
        assert ended == [b"ours"]
        for stranger in strangers:
            stranger.close()
        line.finish()


def test_an_error_while_ranks_call_lets_those_go_that_did(monkeypatch):
    """They would wait for a leader that has given up."""
    hear = Desk._hear
    heard = []

    def hear_once(self, connection, deadline_s):
        if heard:
            raise KeyboardInterrupt
        heard.append(hear(self, connection, deadline_s))
        return heard[0]

    monkeypatch.setattr(Desk, "_hear", hear_once)
    with closing(Desk("127.0.0.1")) as desk:
        ranks = [calling(desk.address, rank, lambda line: line.receive()) for rank in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            desk.take_calls(3, call_s=20, timeout_s=10)
        for thread, ended in ranks:
            thread.join(10)
            assert isinstance(ended[0], RankFailedError)


def test_a_call_that_fails_on_its_way_is_hung_up(monkeypatch):
    """Nobody has the line then, so nobody else could."""
    made = []
    connect = socket.create_connection

    def create(*arguments, **options):
        made.append(connect(*arguments, **options))
        made[-1].shutdown(socket.SHUT_WR)
        return made[-1]

    with closing(Desk("127.0.0.1")) as desk:
        monkeypatch.setattr(socket, "create_connection", create)
        with pytest.raises(RankFailedError, match="cannot be reached"):
            call(desk.address, rank=1, call_s=10, timeout_s=10)
    assert made[0].fileno() == -1


def test_the_desk_is_seen_by_this_machine_alone_where_the_ranks_are_on_it():
    """Nobody else has any business there."""
    for host in ("127.0.0.1", "localhost"):
        with closing(Desk(host)) as desk:
            assert desk._listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_leader_that_is_not_there_is_told_of():
    """A rank must not wait for it for ever."""
    with closing(Desk("127.0.0.1")) as desk:
        address = desk.address
    with pytest.raises(RankFailedError, match="cannot reach rank 0"):
        call(address, rank=1, call_s=2, timeout_s=2)
