"""Sessions: the lives of the writing job on a run, and which of them count.

Two writers must never both believe that they own a run, although no lock can be trusted to a
process that may be stopped for an hour and then go on. So nothing is locked. Instead:

1. A session takes the next number by creating ``sessions/N.json`` exclusively. *Then* it lists the
   commits, chooses the one to go on from, and *then* records it in ``sessions/N.from.json``,
   exclusively. From that moment on it is *settled* and may publish.
2. A writer publishes a manifest, then lists the sessions once more. If there is a number above its
   own, it is *fenced*: it must not acknowledge the commit, must stop, and must delete nothing.
3. The lineage is: the commits of the highest settled session (the *head*), then those of the
   session it went on from up to the commit it went on from, and so on.

Why an acknowledged commit is always on the lineage: the old writer publishes, then looks at the
sessions; the new one creates its session, then looks at the commits. Whichever order the four steps
fall in, either the old writer sees the new session and refuses the acknowledgement, or the new
session sees the commit and (choosing the newest, or an older one on purpose) decides about it.

What is on disk if we stop after each step:

    stopped after              a reader sees                        the next session
    before sessions/N.json     nothing new                          takes number N
    sessions/N.json            N is not settled; the head stays     takes N+1; N never wrote
    sessions/N.from.json       N is the head, with no commits yet;  takes N+1, goes on from the
                               the newest is what N went on from    same commit
    claim of a folder          an incomplete folder                 sweeps it, takes the name
    manifest, not yet acked    the checkpoint                       goes on from it

Each of the two records alone shows that a number was taken: where ``sessions/N.json`` was lost, N
is not given out again while ``sessions/N.from.json`` is there, and fences older sessions as before.

``tests/stateful`` explores every interleaving of a small model of these rules.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import (
    DamagedError,
    ExistsError,
    FencedError,
    FormatError,
    MissingError,
    StorageError,
)
from ..format.canonical import dump_record, load_record
from ..format.layout import RUN, SESSIONS, from_key, session_key, session_number
from ..format.manifest import FORMAT_VERSION, check_version
from ..format.numbers import is_count, is_moment
from ..processes.functions import refuse_while_imported
from ..stores.base import Entry, Store
from .damage import raise_unreachable
from .identity import Identity, is_gone, this_process
from .parallel import each

__all__ = [
    "Origin",
    "RunRecord",
    "Session",
    "SessionCache",
    "check_not_fenced",
    "ensure_run",
    "is_provably_dead",
    "list_sessions",
    "open_session",
    "read_run",
    "record_origin",
]

Layout = Literal["milepost", "torch"]

_OPEN_TRIES = 100
_MAX_RECORD_BYTES = 1024 * 1024
_FROM = re.compile(r"(\d{8,})\.from\.json")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Identity of a run.

    Attributes:
        run_id: Random identity, in hex.
        layout: ``milepost``, or ``torch`` where people see one file per checkpoint.
        created_s: Seconds since 1970 by its creator's clock.
    """

    run_id: str
    layout: str
    created_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit that a session went on from.

    Attributes:
        name: Its folder.
        session: Number of the session that wrote it.
        attempt: Number of the attempt within that session.
    """

    name: str
    session: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Session:
    """One life of the writing job on a run.

    Attributes:
        number: Its number; a higher one owns the run.
        run_id: The run.
        host: The machine.
        pid: The process that opened it.
        boot_id: The start of the machine it ran in.
        started_s: Seconds since 1970 by its own clock. For people.
        process_start: Tells the process from a later one with the same number.
        origin: What it went on from; ``None`` for a fresh start, and while it is not settled.
        is_settled: Whether it has recorded what it went on from.
        problem: Why a record of it cannot be read, else empty.
        machine_id: Tells the machine from another of the same name; empty where it is not known.
    """

    number: int
    run_id: str
    host: str
    pid: int
    boot_id: str
    started_s: float
    process_start: str = ""
    origin: Origin | None = None
    is_settled: bool = False
    problem: str = ""
    machine_id: str = ""


def ensure_run(
    store: Store,
    *,
    layout: str = "milepost",
    run_id: str | None = None,
    clock: Callable[[], float] = time.time,
) -> RunRecord:
    """Return the run at a store, creating it if there is none.

    Args:
        store: Where the run is kept.
        layout: For a new run only; one that exists keeps its own.
        run_id: Identity that its checkpoints bear, for a run whose record was lost; by default a
            new one.
        clock: Returns the seconds since 1970.
    """
    try:
        return read_run(store)
    except MissingError:
        fields = {
            "format": FORMAT_VERSION,
            "run_id": run_id or secrets.token_hex(16),
            "created_s": clock(),
            "layout": layout,
        }
        try:
            store.put_new(RUN, dump_record(fields))
        except ExistsError:
            return read_run(store)  # another process was quicker
        return _run_record(fields, where=RUN)


def read_run(store: Store) -> RunRecord:
    """Return the run at a store.

    Raises:
        MissingError: There is no run.
        NewerFormatError: A newer Milepost made it.
        DamagedError: Its record is torn or altered.
    """
    try:
        data = store.get(RUN, max_bytes=_MAX_RECORD_BYTES)
    except MissingError as error:
        raise MissingError(
            f"There is no run at {store.url}.",
            hint="Check the path; a run is the folder that holds run.json.",
            path=store.url,
        ) from error
    where = f"{store.url}/{RUN}"
    fields = load_record(data, where=where)
    check_version(fields.get("format"), where=where)
    return _run_record(fields, where=where)


def open_session(
    store: Store,
    run: RunRecord,
    *,
    identity: Identity | None = None,
    clock: Callable[[], float] = time.time,
) -> Session:
    """Begin a session: every older one is fenced from here on.

    The caller lists the commits next, chooses one, and calls :func:`record_origin`.

    Args:
        store: The run's store.
        run: The run.
        identity: Who opens it; the calling process by default.
        clock: Returns the seconds since 1970.

    Raises:
        ExistsError: Other processes kept taking the next number.
        UsageError: This process only imports a script that does this.
    """
    refuse_while_imported("opened a run")
    me = identity or this_process()
    for _ in range(_OPEN_TRIES):
        number = max(_numbers(store), default=0) + 1
        session = Session(
            number,
            run.run_id,
            me.host,
            me.pid,
            me.boot_id,
            clock(),
            me.process_start,
            machine_id=me.machine_id,
        )
        try:
            store.put_new(session_key(number), dump_record(_session_fields(session)))
        except ExistsError:
            continue
        return session
    raise ExistsError(
        f"Could not open a session at {store.url}: {_OPEN_TRIES} times another process took the "
        "next number.",
        hint="Find the processes that write to this run and stop all but one.",
        path=store.url,
    )


def record_origin(store: Store, session: Session, origin: Origin | None) -> Session:
    """Record what a session goes on from; it may publish afterwards.

    Args:
        store: The run's store.
        session: The session, as it was opened.
        origin: The commit, or ``None`` for a fresh start.

    Returns:
        The settled session: pass this one on.

    Raises:
        ExistsError: The session has recorded something else already.
    """
    fields = {
        "format": FORMAT_VERSION,
        "name": origin.name if origin else None,
        "session": origin.session if origin else None,
        "attempt": origin.attempt if origin else None,
    }
    settled = replace(session, origin=origin, is_settled=True)
    key = from_key(session.number)
    try:
        store.put_new(key, dump_record(fields))
    except ExistsError as error:
        # Our own record after an answer that was lost is as good as a fresh one.
        if _read_origin(store, session.number) != origin:
            raise ExistsError(
                f"{key} at {store.url} says already what session {session.number} went on from.",
                safe="It was not touched, and nothing was saved.",
                hint="Start again: that opens a session with a number of its own.",
                path=key,
                session=session.number,
            ) from error
    return settled


SessionCache = dict[int, tuple[Entry, Entry, Session]]
"""Settled sessions that a process has read, with what the store showed for their two records."""


def list_sessions(store: Store, cache: SessionCache | None = None) -> list[Session]:
    """Return every session, the oldest first.

    A session whose record cannot be read keeps its number, so that it still fences older ones.

    Args:
        store: The run's store.
        cache: What was read before: the records of a settled session never change.
    """
    numbers, settled = _listed(store)
    known = {} if cache is None else cache

    def read(number: int) -> Session:
        entries = numbers[number], settled.get(number)
        if number in known and known[number][:2] == entries:
            return known[number][2]
        session = _read_session(store, number, is_settled=entries[1] is not None)
        if entries[1] is not None and not session.problem:
            known[number] = entries[0], entries[1], session
        return session

    return each(store, read, sorted(numbers))


def is_provably_dead(session: Session, identity: Identity | None = None) -> bool:
    """Return whether it is certain that the process of a session has ended.

    Only the same machine can tell: after it was started anew, or once the process is gone or its
    number belongs to another one. Everything else is not certain, and so is the same name.
    """
    other = Identity(
        session.host, session.pid, session.boot_id, session.process_start, session.machine_id
    )
    return not session.problem and is_gone(other, identity or this_process())


def check_not_fenced(store: Store, session: Session) -> None:
    """Return if no newer session owns the run.

    Raises:
        FencedError: One does. The message names its machine and process.
    """
    newest = max(_numbers(store), default=0)
    if newest <= session.number:
        return
    owner = _read_session(store, newest, is_settled=False)
    by = f" on {owner.host}, process {owner.pid}" if owner.host else ""
    raise FencedError(
        f"Session {newest}{by} has taken over the run at {store.url} from session "
        f"{session.number}.",
        safe="Everything that was acknowledged before is on the run and counts.",
        hint="Stop this process; it must write and delete nothing more.",
        path=store.url,
        session=session.number,
        newer_session=newest,
        host=owner.host,
        pid=owner.pid,
    )


def _numbers(store: Store) -> set[int]:
    """Return every number that was taken.

    The second record is only ever made after the first, so it alone shows it too: a number that
    was given out twice would let two writers believe that they own the run.
    """
    numbers, settled = _listed(store)
    return numbers.keys() | settled.keys()


def _listed(store: Store) -> tuple[dict[int, Entry], dict[int, Entry]]:
    """Return the records of sessions, and those of what they went on from, by number."""
    numbers: dict[int, Entry] = {}
    settled: dict[int, Entry] = {}
    for entry in store.list(SESSIONS):
        number = session_number(entry.key)
        if number is not None:
            numbers[number] = entry
        elif match := _FROM.fullmatch(entry.key.rpartition("/")[2]):
            settled[int(match[1])] = entry
    return numbers, settled


def _run_record(fields: Mapping[str, Any], *, where: str) -> RunRecord:
    run_id, layout, created_s = (fields.get(k) for k in ("run_id", "layout", "created_s"))
    if not isinstance(run_id, str) or not isinstance(layout, str):
        raise FormatError(f"{where} is not the record of a run.", path=where)
    return RunRecord(run_id, layout, float(created_s) if is_moment(created_s) else 0.0)


def _session_fields(session: Session) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "number": session.number,
        "run_id": session.run_id,
        "host": session.host,
        "pid": session.pid,
        "boot_id": session.boot_id,
        "process_start": session.process_start,
        "machine_id": session.machine_id,
        "started_s": session.started_s,
    }


def _read_session(store: Store, number: int, *, is_settled: bool) -> Session:
    key = session_key(number)
    session = Session(number, "", "", 0, "", 0.0)
    try:
        fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
        pid, started_s = fields["pid"], fields["started_s"]
        session = Session(
            number,
            str(fields["run_id"]),
            str(fields["host"]),
            pid if is_count(pid) else 0,  # of no process
            str(fields["boot_id"]),
            started_s if is_moment(started_s) else 0.0,
            str(fields.get("process_start", "")),
            machine_id=str(fields.get("machine_id", "")),
        )
    except (MissingError, FormatError, StorageError) as error:
        raise_unreachable(store, error)
        session = replace(session, problem=str(error))
    except (KeyError, TypeError, ValueError) as error:
        session = replace(session, problem=f"{key} is not the record of a session: {error}.")
    if not is_settled:
        return session
    try:
        return replace(session, origin=_read_origin(store, number), is_settled=True)
    except (MissingError, FormatError, StorageError) as error:
        raise_unreachable(store, error)
        return replace(session, problem=str(error))


def _read_origin(store: Store, number: int) -> Origin | None:
    key = from_key(number)
    fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    name, session, attempt = (fields.get(k) for k in ("name", "session", "attempt"))
    if name is None and session is None and attempt is None:
        return None
    if not isinstance(name, str) or not is_count(session) or not is_count(attempt):
        raise FormatError(f"{key} is not the record of an origin.", path=key)
    if session >= number:
        raise DamagedError(f"{key}: session {number} cannot go on from {session}.", path=key)
    return Origin(name, session, attempt)
