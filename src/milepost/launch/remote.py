"""The workers of one attempt on several machines, seen from the launcher.

Each machine is reached by a :class:`Link` and has a :class:`~.node.Node` at its end. A thread for
each of them brings what the workers wrote down into the folder of the attempt here, and what
happened to them into the queue of events, in this order.

A machine that is lost has lost its workers: an :class:`~.engine.Ended` without a code is put for
each. So it is for one that fails to tell of them. Nothing of the training is here, so nothing of it
is lost with this process.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError, DeadlineError, NodeLostError, StorageError
from ..stores.url import open_store
from .engine import Ended, Events, Plan
from .environment import Spot
from .node import News, Share, probe_key
from .output import Shown

__all__ = ["Link", "RemoteGroup", "check_machines"]

_log = logging.getLogger("milepost")

_LISTEN_S = 0.2
_ANSWER_S = 15.0
_CLOSE_S = 60.0
_JOIN_S = 15.0


class Link(Protocol):
    """A way to the node of one machine."""

    name: str
    """How people know the machine."""

    address: str
    """How the other machines reach it."""

    def ask(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Call a method of the node and return what it returns, or raise what it raises.

        Raises:
            NodeLostError: The machine is gone, or has not answered within ``timeout_s`` seconds.
        """


class RemoteGroup:
    """The workers of one attempt, a number of them on each machine.

    Args:
        plan: The attempt.
        links: A way to each machine; the first has rank 0.
        counts: How many workers each has.
        events: Where what happens is put.
        working_folder: Where they run.
        variables: Variables for the environment of the workers, by machine.
        silent_s: Seconds without an answer after which a machine is lost.
    """

    def __init__(
        self,
        plan: Plan,
        links: Sequence[Link],
        counts: Sequence[int],
        *,
        events: Events,
        working_folder: str,
        variables: Sequence[dict[str, str]] | None = None,
        silent_s: float = 30.0,
    ) -> None:
        self._plan = plan
        self._links = links
        self._spots = spots_of(counts)
        self._events = events
        self._working_folder = working_folder
        self._variables = variables or [{} for _ in links]
        self._silent_s = silent_s
        self._threads: list[threading.Thread] = []
        self._lost: set[str] = set()
        self._shown = Shown()
        self.running: set[int] = set()
        """Ranks whose end has not been taken from the events yet."""

    def start(self) -> None:
        """Start them all. If it raises, none is left."""
        plan = self._plan
        config = (plan.folder / "config.json").read_text(encoding="utf-8")
        try:
            host = self._links[0].address
            port, meeting = self._links[0].ask(
                "hold_ports", _interface(self._links), timeout_s=self._silent_s
            )
            for link, spots, variables in zip(
                self._links, self._spots, self._variables, strict=True
            ):
                share = Share(
                    plan=plan,
                    spots=tuple(spots),
                    address=(host, port),
                    meeting=f"{host}:{meeting}",
                    config=config,
                    working_folder=self._working_folder,
                    variables=variables,
                )
                self.running |= {spot.rank for spot in spots}
                link.ask("start", share, timeout_s=self._silent_s)
                self._listen_to(link, {spot.rank for spot in spots})
        except BaseException:
            self.close()
            raise

    def signal(self, number: int, *, but: int | None = None) -> None:
        """Send a signal to every worker that runs, and to nothing that it has started."""
        self._ask_all("signal", number, but, timeout_s=_ANSWER_S)

    def kill(self) -> None:
        """Kill every worker and all that it has started."""
        self._ask_all("kill", timeout_s=_ANSWER_S)

    def close(self) -> None:
        """Kill what is left, wait until it is gone, and fetch the last of what it wrote.

        Raises:
            DeadlineError: A worker does not even end on SIGKILL.
        """
        errors = self._ask_all("close", timeout_s=_CLOSE_S)
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._ask_all("remove", timeout_s=_ANSWER_S)
        stuck = [error for error in errors if isinstance(error, DeadlineError)]
        if stuck:
            raise stuck[0]

    def _ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Exception]:
        """Ask every machine that is there, at once; return what went wrong."""

        def ask(link: Link) -> Exception | None:
            try:
                link.ask(method, *arguments, timeout_s=timeout_s)
            except NodeLostError:
                return None  # told by the thread that listens to it
            except Exception as error:  # noqa: BLE001 - the other machines are asked all the same
                _log.warning("The machine %s failed (%s): %s", link.name, method, error)
                return error
            return None

        there = [link for link in self._links if link.name not in self._lost]
        if not there:
            return []
        with ThreadPoolExecutor(len(there), "milepost-launch-ask") as pool:
            return [error for error in pool.map(ask, there) if error is not None]

    def _listen_to(self, link: Link, ranks: set[int]) -> None:
        thread = threading.Thread(
            target=lambda: self._listen(link, ranks),
            name=f"milepost-launch-{link.name}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _listen(self, link: Link, ranks: set[int]) -> None:
        """Pass on what comes from a machine, and if that fails the end of those who run there.

        Whatever the error is: an end that nobody tells of would be waited for for ever.
        """
        try:
            self._pass_on(link, ranks)
        except BaseException as error:
            if isinstance(error, NodeLostError):
                self._lost.add(link.name)
            else:
                # It is there, and is asked to close like the others.
                _log.warning("Nothing is heard of the workers on %s", link.name, exc_info=error)
            for rank in sorted(ranks):
                self._events.put(Ended(self._plan.number, rank, None, _why(link.name, error)))
            if not isinstance(error, Exception):
                raise

    def _pass_on(self, link: Link, ranks: set[int]) -> None:
        """Pass on what comes from a machine until nothing more will come."""
        mirror = _Mirror(self._plan.attempt_folder, self._shown)
        for number in count():
            news: News = link.ask("listen", number, _LISTEN_S, timeout_s=self._silent_s)
            mirror.write(news)
            for event in news.events:
                if isinstance(event, Ended):
                    ranks.discard(event.rank)
                self._events.put(event)
            if news.is_last:
                return


class _Mirror:
    """Writes here what workers have written down elsewhere.

    Args:
        folder: Folder of the attempt.
        shown: Shows the log of rank 0.
    """

    def __init__(self, folder: Path, shown: Shown) -> None:
        self._folder = folder
        self._shown = shown
        self._has_failed = False

    def write(self, news: News) -> None:
        """Write what has come. A training does not end because its logs cannot be kept."""
        for piece in news.pieces:
            if piece.name == "rank-0.log":
                self._shown.show(piece.data)
            try:
                self._put(piece.name, piece.offset, piece.data)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning("Logs and beats of workers cannot be kept: %s", error)

    def _put(self, name: str, offset: int | None, data: bytes) -> None:
        path = self._folder / Path(name).name
        if offset is None:
            scratch = path.with_name(f".{path.name}")
            scratch.write_bytes(data)
            scratch.replace(path)
            return
        with path.open("r+b" if path.exists() else "x+b") as file:
            file.seek(offset)
            file.write(data)


def check_machines(
    links: Sequence[Link], place: str, *, needed: Sequence[str], timeout_s: float
) -> None:
    """Require that every machine reaches the place of the run, and has what it needs.

    The launcher leaves a file there, every machine reads it and leaves another one, and the
    launcher reads those.

    Args:
        links: The machines.
        place: The place.
        needed: Files and folders that every machine must have under the same path.
        timeout_s: Seconds that a machine may take.

    Raises:
        StorageError: A machine does not reach it, or lacks something; it is named.
    """
    token = secrets.token_hex(8)
    store = open_store(place)
    keys = [probe_key(token, "launcher")]
    store.put_new(keys[0], token.encode())
    try:
        for number, link in enumerate(links):
            keys.append(probe_key(token, str(number)))
            try:
                link.ask(
                    "check",
                    place=place,
                    token=token,
                    number=number,
                    needed=tuple(needed),
                    timeout_s=timeout_s,
                )
                store.get(keys[-1], max_bytes=1024)
            except NodeLostError:
                raise
            except CheckpointError as error:
                raise _apart(link.name, place, error) from error
    finally:
        for key in keys:
            with suppress(CheckpointError):  # the error that matters is on its way
                store.delete(key)


def spots_of(counts: Sequence[int]) -> list[list[Spot]]:
    """Number the workers of machines that have so many each."""
    total, ends = sum(counts), list(accumulate(counts))
    return [
        [
            Spot(
                rank=end - num + local_rank,
                local_rank=local_rank,
                node_rank=node_rank,
                num_workers=total,
                num_local=num,
                num_nodes=len(counts),
            )
            for local_rank in range(num)
        ]
        for node_rank, (num, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _interface(links: Sequence[Link]) -> str:
    """Return where rank 0 listens: on one machine nobody else should reach it."""
    return "" if len(links) > 1 else links[0].address


def _why(name: str, error: BaseException) -> str:
    if isinstance(error, NodeLostError):
        return error.what
    told = error.what if isinstance(error, CheckpointError) else repr(error)
    return f"The workers on the machine {name} cannot be followed: {told}"


def _apart(name: str, place: str, error: CheckpointError) -> StorageError:
    return StorageError(
        f"The machine {name} cannot take part: {error.what}",
        safe="No worker was started.",
        hint=f"Every machine must reach {place} and see the same there, such as a shared folder or "
        "an object store, and have the code under the same path.",
        node=name,
        place=place,
    )
