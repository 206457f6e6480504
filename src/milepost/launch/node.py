"""One machine's share of the workers, for a launcher that reaches it by messages only.

The workers are started, watched and killed by the same :class:`~.workers.Workers` that the launcher
uses on its own machine. What they write down is read from a temporary folder here and sent along
with what happened to them:

    listen(number) -> News    events, and what has changed in the files since the last time

Messages are numbered: one that was asked for again, since its answer got lost, is sent again.

The events are taken first and the files are read after that, so whatever a worker wrote before it
ended is sent with its end or earlier.

If this process dies, its keeper kills the workers. Nothing here knows by which way the messages
come.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import MissingError, UsageError, storage_error
from ..processes.keeping import Keeper
from ..reporting.current import MEET
from ..stores.url import open_store
from .engine import Ended, Event, Plan
from .environment import HeldPort, Spot, environment_of
from .workers import Workers

__all__ = ["Changes", "News", "Node", "Piece", "Share", "probe_key"]

_MAX_NEWS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one machine has to start.

    Attributes:
        plan: The attempt.
        spots: Where each of its workers stands.
        address: Where rank 0 listens for the others.
        meeting: Where ranks meet that report, as ``host:port``.
        config: Text of the launch's ``config.json``.
        working_folder: Where the workers run.
        variables: Variables for the environment of the workers of this machine.
    """

    plan: Plan
    spots: tuple[Spot, ...]
    address: tuple[str, int]
    meeting: str
    config: str
    working_folder: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """A change of a file in the folder of the attempt.

    Attributes:
        name: Name of the file.
        offset: Where the bytes belong; ``None``: they are the whole file.
        data: The bytes.
    """

    name: str
    offset: int | None
    data: bytes


@dataclass(frozen=True, slots=True)
class News:
    """What has happened since the last time.

    Attributes:
        events: What happened to workers, in order.
        pieces: What they wrote down before that.
        is_last: Whether the workers are gone and nothing more will come.
    """

    events: tuple[Event, ...]
    pieces: tuple[Piece, ...]
    is_last: bool


class Node:
    """Starts and watches the workers of one attempt on this machine.

    Its methods are called from several threads: one of them waits in :meth:`listen`.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="milepost-node-"))
        self._keeper = Keeper(is_apart=True)
        self._keeper.sweep(self._folder)
        # The kernel ends a worker when the thread that started it ends, so that is one of our own.
        self._starter = ThreadPoolExecutor(1, "milepost-node")
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ports: tuple[HeldPort, ...] = ()
        self._workers: Workers | None = None
        self._changes: Changes | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._listening = threading.Lock()
        self._num_told = 0
        self._news = News((), (), is_last=False)

    def hold_ports(self, host: str) -> tuple[int, int]:
        """Return ports for rank 0, held until all are gone: for the group and for reports."""
        for port in self._ports:
            port.close()
        self._ports = (HeldPort(host=host), HeldPort(host=host))
        return self._ports[0].number, self._ports[1].number

    def check(self, *, place: str, token: str, number: int, needed: tuple[str, ...]) -> None:
        """Require that this machine sees what the launcher sees.

        Args:
            place: Where the run is kept. A file of the launcher must be there, and another one is
                left for it to find.
            token: Name and content of the file.
            number: Number of this machine.
            needed: Files and folders that must be here under the same path.

        Raises:
            CheckpointError: It does not.
        """
        for path in needed:
            if not os.path.exists(path):  # noqa: PTH110 - as it was given
                raise MissingError(f"There is no {path}.", path=path)
        store = open_store(place)
        found = store.get(probe_key(token, "launcher"), max_bytes=1024)
        if found != token.encode():
            raise UsageError(f"{place} holds something else than what was written there.")
        store.put(probe_key(token, str(number)), token.encode())

    def start(self, share: Share) -> None:
        """Start the workers."""
        plan = share.plan
        folder = self._folder / f"attempt-{plan.number}"
        try:
            folder.mkdir()
            (self._folder / "config.json").write_text(share.config, encoding="utf-8")
        except OSError as error:
            raise storage_error(error, operation="write", path=str(folder)) from error
        self._changes = Changes(folder)
        workers = Workers(
            plan,
            {
                spot.rank: environment_of(
                    spot,
                    plan=plan,
                    address=share.address,
                    launch_folder=self._folder,
                    base={**os.environ, **share.variables, MEET: share.meeting},
                )
                for spot in share.spots
            },
            folder=folder,
            events=self._events,
            keeper=self._keeper,
            working_folder=share.working_folder,
            shown_rank=None,
        )
        self._starter.submit(self._start, workers).result()
        self._workers = workers

    def listen(self, number: int, wait_s: float) -> News:
        """Return what has happened, as soon as something has, after ``wait_s`` at the latest.

        Beats and logs do not count as something: they are sent with the rest.

        Args:
            number: How many answers have arrived so far.
            wait_s: How long to wait for something to happen, in seconds.
        """
        with self._listening:
            if number == self._num_told:
                self._news = self._next_news(wait_s)
                self._num_told += 1
            return self._news

    def _next_news(self, wait_s: float) -> News:
        events: list[Event] = []
        assert self._changes is not None
        was_closed = self._is_closed
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=0 if self._changes.has_more else wait_s))
            while True:
                events.append(self._events.get_nowait())
        for event in events:
            if isinstance(event, Ended) and self._workers is not None:
                self._workers.running.discard(event.rank)
        pieces = self._changes.pieces()
        return News(tuple(events), pieces, was_closed and not events and not pieces)

    def signal(self, number: int, but: int | None) -> None:
        """Send a signal to the workers that run; see ``Workers.signal``."""
        if self._workers is not None:
            self._workers.signal(number, but=but)

    def kill(self) -> None:
        """Kill the workers and all that they have started."""
        if self._workers is not None:
            self._workers.kill()

    def close(self) -> None:
        """Kill what is left, and let go of the ports. Then :meth:`listen` comes to its last."""
        with self._closing:
            if self._is_closed:
                return
            try:
                if self._workers is not None:
                    self._workers.close()
            finally:
                for port in self._ports:
                    port.close()
                self._starter.shutdown()
                self._is_closed = True

    def remove(self) -> None:
        """Remove the temporary folder. Nothing can be asked any more."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keeper.close()

    @staticmethod
    def _start(workers: Workers) -> None:
        # Whoever runs this process may have blocked signals, and workers would inherit that.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        workers.start()


class Changes:
    """What changes in the folder of an attempt.

    Logs only grow, and are told by what was added. Other files are told whole. Names that begin
    with a dot are files on their way to another name.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        self.has_more = False
        """Whether there was more to tell than could be told at once."""

    def pieces(self) -> tuple[Piece, ...]:
        """Return what has changed since the last time, 4 MiB at most."""
        found: list[Piece] = []
        left_bytes = _MAX_NEWS_BYTES
        self.has_more = False
        with os.scandir(self._folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        for name in names:
            piece = self._log(name, left_bytes) if name.endswith(".log") else self._whole(name)
            if piece is not None:
                found.append(piece)
                left_bytes -= len(piece.data)
        return tuple(found)

    def _log(self, name: str, left_bytes: int) -> Piece | None:
        done_bytes = self._sizes.get(name, 0)
        with (self._folder / name).open("rb") as file:
            file.seek(done_bytes)
            data = file.read(max(0, left_bytes))
            self.has_more |= bool(file.read(1))
        if not data:
            return None
        self._sizes[name] = done_bytes + len(data)
        return Piece(name, done_bytes, data)

    def _whole(self, name: str) -> Piece | None:
        path = self._folder / name
        try:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_ino, status.st_size)
            if self._seen.get(name) == state:
                return None
            data = path.read_bytes()  # may be newer than the state, and is then told once more
        except FileNotFoundError:
            return None
        self._seen[name] = state
        return Piece(name, None, data)


def probe_key(token: str, who: str) -> str:
    """Return the key of a file by which machines see whether they share a place."""
    return f"probe-{token}-{who}"
