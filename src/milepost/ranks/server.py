"""The key-value server that ranks talk through, and the board on it: apart from the training's own.

The messages of a rank go out from a thread of their own, as many at a time as are waiting. So the
thread that sends them never waits for the leader, and a rank that sends a thousand small ones makes
only a few requests.

A batch of messages is stored first, under the rank and its number, and then announced by a bell:
bells are numbered for all ranks together, so that the leader can wait for any rank at all. A rank
that dies between the two, or between taking the number of a bell and ringing it, leaves a gap; then
the leader looks at what every rank has stored, and leaves the bell out.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

if dist.is_available():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..errors import CheckpointError, DeadlineError, RankFailedError
from ..format import tree
from .outcome import Outcome

__all__ = ["JOIN_TIMEOUT_S", "Server", "ServerBoard", "meet_at", "open_server"]

JOIN_TIMEOUT_S = 60.0

_CHUNK_BYTES = 4 * 1024 * 1024  # the server takes 8 MiB at a time
_MAX_BATCH = 64
_LONG_S = 3600.0
_SIGNALS_S = 1.0
_BELL_S = 5.0


class Server:
    """Connections to the key-value server: as many as there are threads that use it at a time.

    They are kept for the next thread. A new one is not always quick: it may look up names.
    """

    def __init__(self, host: str, port: int, server: TCPStore | None) -> None:
        self._address = (host, port)
        self._server = server  # held: it ends with the last reference
        self._lock = threading.Lock()
        self._idle: list[TCPStore] = []
        self._pieces: dict[str, int] = {}  # of long messages, to remove them whole
        self._gone: RankFailedError | None = None

    @property
    def host(self) -> str:
        """Return the name of the leader's machine, as the other ranks know it."""
        return self._address[0]

    def put(self, key: str, message: bytes) -> None:
        """Store a message of ASCII, of any length.

        Raises:
            RankFailedError: The leader is gone.
        """
        starts = range(0, len(message), _CHUNK_BYTES)
        for number, start in enumerate(starts[1:], start=1):
            self.set(f"{key}~{number}", message[start : start + _CHUNK_BYTES])
        self._note_pieces(key, len(starts))
        self.set(key, _head(len(starts)) + message[:_CHUNK_BYTES])

    def put_first(self, key: str, message: bytes) -> None:
        """Store a short message of ASCII unless there is one.

        Raises:
            RankFailedError: The leader is gone.
        """
        self.set_first(key, _head(1) + message)

    def take(self, key: str, timeout_s: float) -> bytes:
        """Return a message as soon as it is there; it stays.

        Raises:
            DeadlineError: It did not come.
            RankFailedError: The leader is gone.
        """
        count, _, first = self.get(key, timeout_s).partition(b" ")
        self._note_pieces(key, int(count))
        more = (f"{key}~{number}" for number in range(1, int(count)))
        # They were stored before the first one.
        return b"".join([first, *(self.get(one, JOIN_TIMEOUT_S) for one in more)])

    def set(self, key: str, value: bytes) -> None:
        """Store a short value of ASCII.

        Raises:
            RankFailedError: The leader is gone.
        """
        with self._connection() as connection:
            connection.set(key, value.decode("ascii"))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return a value as soon as it is there.

        Raises:
            DeadlineError: It did not come.
            RankFailedError: The leader is gone.
        """
        try:
            with self._connection() as connection:
                connection.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
                return bytes(connection.get(key))
        except DeadlineError as error:
            raise DeadlineError(
                f"{key} did not come within {timeout_s:g} s.", key=key
            ) from error.__cause__

    def has(self, keys: list[str]) -> bool:
        """Return whether all of some keys are there now.

        Raises:
            RankFailedError: The leader is gone.
        """
        with self._connection() as connection:
            return bool(connection.check(keys))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Store a value of ASCII unless there is one; return the one that is there.

        Raises:
            RankFailedError: The leader is gone.
        """
        with self._connection() as connection:
            return bytes(connection.compare_set(key, "", value.decode("ascii")))

    def next_number(self, key: str, *, by: int = 1) -> int:
        """Return 1, 2, 3, ...: each number to one caller only. By 0 it is the last one given out.

        Raises:
            RankFailedError: The leader is gone.
        """
        with self._connection() as connection:
            return int(connection.add(key, by))

    def forget(self, key: str) -> None:
        """Remove a value or a message.

        Raises:
            RankFailedError: The leader is gone.
        """
        with self._lock:
            count = self._pieces.pop(key, 1)
        with self._connection() as connection:
            connection.delete_key(key)
            for number in range(1, count):
                connection.delete_key(f"{key}~{number}")

    def close(self) -> None:
        """Let go of everything, while the interpreter is whole: it ends threads of torch."""
        with self._lock:
            self._idle.clear()
        self._server = None

    def _note_pieces(self, key: str, count: int) -> None:
        if count > 1:
            with self._lock:
                self._pieces[key] = count

    @contextmanager
    def _connection(self) -> Iterator[TCPStore]:
        """Lend a connection to the calling thread. One that has failed is not used again.

        Nor is another one made then: a leader that is gone does not come back, and trying would
        take as long as waiting for one that has yet to come.
        """
        with self._lock:
            if self._gone is not None:
                raise self._gone
            found = self._idle.pop() if self._idle else None
        try:
            connection = found or self._connect()
        except RuntimeError as error:
            raise self._has_gone(error) from error
        try:
            yield connection
        except dist.DistStoreError as error:  # it only waited in vain
            self._keep(connection)
            raise DeadlineError("Rank 0 did not answer in time.", rank=0) from error
        except RuntimeError as error:
            raise self._has_gone(error) from error
        self._keep(connection)

    def _has_gone(self, error: RuntimeError) -> RankFailedError:
        self._gone = _leader_gone(error)
        return self._gone

    def _keep(self, connection: TCPStore) -> None:
        with self._lock:
            self._idle.append(connection)

    def _connect(self) -> TCPStore:
        host, port = self._address
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        return TCPStore(host, port, is_master=False, timeout=timeout)


def _head(count: int) -> bytes:
    """Return what stands before a message: in how many pieces it is."""
    return f"{max(count, 1)} ".encode()


def _leader_gone(error: BaseException) -> RankFailedError:
    return RankFailedError(
        f"Rank 0 cannot be reached any more: {error}",
        safe="Earlier checkpoints are intact; whether this one was committed shows in the run.",
        hint="Look at the log of rank 0, and start all ranks again.",
        rank=0,
    )


def open_server(host: str, port: int = 0) -> TCPStore:
    """Open the server in this process; on a loopback address nobody else's machine can reach it.

    Left to itself it would listen at every address of the machine.

    Args:
        host: How the ranks know this machine.
        port: The port; 0 for any.

    Raises:
        RuntimeError: It cannot be opened.
    """
    if host != "localhost" and not host.startswith("127."):
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise RuntimeError(f"{host}:{port} cannot be listened at: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # it is the store's now
    )


def meet_at(host: str, port: int, *, rank: int) -> Server:
    """Return a server at an address that every rank was told; the leader opens it there.

    Raises:
        RankFailedError: It cannot be opened, or the leader did not come.
    """
    server: TCPStore | None = None
    if rank == 0:
        try:
            server = open_server(host, port)
        except RuntimeError as error:
            raise RankFailedError(
                f"The ranks cannot meet at {host}:{port}: {error}",
                safe="Nothing was touched.",
                hint="Another program may have taken the port; start again.",
                rank=0,
            ) from error
    return Server(host, port, server)


class ServerBoard:
    """A board on a key-value server; see :class:`~milepost.ranks.board.Board`.

    Args:
        server: The server.
        rank: This rank.
        world_size: The number of ranks.
        name: Prefix of all keys.
    """

    def __init__(self, server: Server, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._server = server
        self._name = name
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._num_sent = 0
        self._num_bells = 0
        self._taken = [0] * world_size
        self._error: CheckpointError | None = None
        # A daemon: a leader that does not answer must not keep a process that ends.
        self._sender = threading.Thread(target=self._send_all, name="milepost-board", daemon=True)
        self._sender.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send the leader a message; see ``Board``."""
        # Here, so that the error of what cannot be sent is its own sender's, and nobody else's.
        text = json.dumps(tree.encode([message]), allow_nan=False)[1:-1]
        with self._changed:
            if self._error is not None:
                raise self._error
            self._num_waiting += 1
        self._queue.put(text)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything has arrived; see ``Board``."""
        with self._changed:
            is_sent = self._changed.wait_for(
                lambda: self._num_waiting == 0 or self._error is not None, timeout_s
            )
            if self._error is not None:
                raise self._error
        if not is_sent:
            raise DeadlineError(
                f"Messages of rank {self.rank} did not reach rank 0 within {timeout_s:g} s.",
                rank=self.rank,
            )

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return the next messages; see ``Board``."""
        deadline_s = time.monotonic() + (_LONG_S if timeout_s is None else timeout_s)
        while True:
            left_s = deadline_s - time.monotonic()
            messages = self._await_bell(min(max(left_s, 0.001), _BELL_S))
            if messages or time.monotonic() >= deadline_s:
                return messages

    def _await_bell(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait for the next bell, and return what its rank has stored."""
        bell = f"{self._name}/bell/{self._num_bells + 1}"
        try:
            rank = int(self._server.get(bell, timeout_s))
        except DeadlineError:
            return self._look_behind_gap(bell)
        self._num_bells += 1
        self._server.forget(bell)
        return self._take(rank)

    def _look_behind_gap(self, bell: str) -> list[dict[str, Any]]:
        """Return what was stored without a bell, and go on after a bell that was never rung."""
        # Before looking: what a bell announces is stored before the bell gets its number.
        has_gap = self._server.next_number(f"{self._name}/bells", by=0) > self._num_bells
        found = [message for rank in range(self.world_size) for message in self._take(rank)]
        if has_gap and not self._server.has([bell]):
            self._num_bells += 1
        return found

    def _take(self, rank: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while self._server.has([key := f"{self._name}/from/{rank}/{self._taken[rank] + 1}"]):
            found += tree.decode(json.loads(self._server.take(key, JOIN_TIMEOUT_S)))
            self._taken[rank] += 1
            self._server.forget(key)
        return found

    def post(self, key: str, value: Any = None, *, error: BaseException | None = None) -> None:
        """Answer under a key; see ``Board``."""
        outcome = Outcome(0, value) if error is None else Outcome.of_error(0, key, error)
        self._server.put(f"{self._name}/{key}", outcome.to_bytes())

    def read(self, key: str, *, task: str, timeout_s: float) -> Any:
        """Return what was posted; see ``Board``."""
        outcome = Outcome.from_bytes(self._await(f"{self._name}/{key}", task, timeout_s))
        if outcome.is_failure:
            raise outcome.exception()
        return outcome.value

    def forget(self, key: str) -> None:
        """Take back what was posted."""
        self._server.forget(f"{self._name}/{key}")

    def close(self) -> None:
        """Let go of everything."""
        self._queue.put(None)
        self._sender.join(JOIN_TIMEOUT_S)
        self._server.close()

    def _await(self, key: str, task: str, timeout_s: float) -> bytes:
        """Wait for a value, and let signals be handled meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return self._server.take(key, min(max(left_s, 0.001), _SIGNALS_S))
            except DeadlineError as error:
                if left_s <= _SIGNALS_S:
                    raise DeadlineError(
                        f"{task} did not come within {timeout_s:g} s.", task=task
                    ) from error

    def _sending_ended(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        if isinstance(error, RuntimeError):
            return _leader_gone(error)
        ended = RankFailedError(
            f"Rank {self.rank} can send no more messages: {type(error).__name__}: {error}",
            safe="Earlier checkpoints are intact; whether this one was committed shows in the run.",
            hint=f"Look at the log of rank {self.rank}, and start all ranks again.",
            rank=self.rank,
        )
        ended.__cause__ = error
        return ended

    def _send_all(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            messages = [message for message in batch if message is not None]
            try:
                if messages:
                    self._num_sent += 1
                    data = f"[{','.join(messages)}]".encode()
                    self._server.put(f"{self._name}/from/{self.rank}/{self._num_sent}", data)
                    number = self._server.next_number(f"{self._name}/bells")
                    self._server.set(f"{self._name}/bell/{number}", str(self.rank).encode())
            except BaseException as error:  # noqa: BLE001 - raised by whoever sends or flushes next
                with self._changed:
                    self._error = self._sending_ended(error)
                    self._changed.notify_all()
                return
            with self._changed:
                self._num_waiting -= len(messages)
                self._changed.notify_all()
            if len(messages) < len(batch):
                return
