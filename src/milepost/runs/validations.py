"""Validations: what is asked about a checkpoint, what was tried, and the verdict.

Small sealed records, each created exclusively and never changed:

    validations/ep3-<id>.request.json         asked for; the checkpoint was committed before
    validations/ep3-<id>.attempt-1.json       a process was about to be started
    validations/ep3-<id>.attempt-1-end.json   and it died, or was stopped for no fault of its own
    validations/ep3-<id>.verdict.json         over

``<id>`` is the beginning of the write id of the checkpoint, so that a checkpoint that was made anew
under an old name has records of its own. A validation is *pending* from its request to its verdict.
Of two verdicts the first counts.

A stop at any moment leaves a request without a verdict, which is taken up again at the next start.
An attempt is recorded before its process begins, and counts until a record says that it was stopped
from outside: so what takes its whole machine down with it is counted too, and ends in a verdict.

A record that cannot be read is passed over with a warning. A verdict of that kind leaves the
validation pending, which protects the checkpoint, until the next one takes its place.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import DamagedError, ExistsError, FormatError, MissingError, StorageError
from ..format import tree
from ..format.canonical import dump_record, load_record
from ..format.layout import VALIDATIONS, check_name
from ..format.manifest import FORMAT_VERSION, check_version
from ..format.numbers import is_count, takes_float
from ..stores.base import Entry, Store
from .damage import raise_unreachable
from .identity import this_process
from .parallel import each

__all__ = [
    "Request",
    "Validation",
    "ValidationStatus",
    "VerdictCache",
    "begin_attempt",
    "delete_validation",
    "end_attempt",
    "list_validations",
    "read_request",
    "record_verdict",
    "request_validation",
    "validation_id",
]

_log = logging.getLogger("milepost")

_ID_LENGTH = 16
_KEY = re.compile(
    rf"{VALIDATIONS}/(?P<name>[^/]+)-(?P<id>[0-9a-f]{{{_ID_LENGTH}}})\."
    r"(?P<kind>request|verdict|attempt-(?P<number>[1-9][0-9]{0,8})(?P<end>-end)?)\.json"
)
_MAX_RECORD_BYTES = 1024 * 1024
_STOPPED, _DIED = "stopped", "died"


class ValidationStatus(str, Enum):
    """How far a validation has come."""

    PENDING = "pending_validation"
    VALIDATED = "validated"
    FAILED = "validation_failed"
    TIMEOUT = "validation_timeout"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Validation:
    """What is known of the validation of one checkpoint.

    Attributes:
        name: The checkpoint.
        id: The beginning of its write id.
        status: How far it has come.
        metrics: What it has found, by name; flat.
        error: Why there are no metrics, with the traceback or the end of the log.
        num_attempts: How many processes were started for it that were not stopped from outside.
        last_number: Number of the last attempt, 0 if there was none.
    """

    name: str
    id: str
    status: ValidationStatus
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    num_attempts: int = 0
    last_number: int = 0

    @property
    def is_pending(self) -> bool:
        """Return whether there is no verdict yet."""
        return self.status is ValidationStatus.PENDING


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        fn_kwargs: Arguments that replace those of the configuration.
        timeout_s: Seconds that it may take; ``None`` for what the configuration says.
    """

    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


VerdictCache = dict[str, tuple[Entry, "Validation | None"]]
"""Verdicts that a process has read, by key; ``None`` for one that cannot be read."""


def validation_id(write_id: str) -> str:
    """Return what the records of a checkpoint are told apart by."""
    return write_id[:_ID_LENGTH]


def list_validations(
    store: Store, cache: VerdictCache | None = None
) -> dict[tuple[str, str], Validation]:
    """Return every validation of a run that was asked for, by name and id of its checkpoint.

    Args:
        store: The run's store.
        cache: Verdicts that were read before.
    """
    seen: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in store.list(VALIDATIONS):
        match = _KEY.fullmatch(entry.key)
        if match is not None:
            seen.setdefault((match["name"], match["id"]), {})[match["kind"]] = entry
    known = {} if cache is None else cache
    summaries = each(store, lambda one: _summary(store, *one[0], one[1], known), [*seen.items()])
    return dict(zip(seen, summaries, strict=True))


def request_validation(
    store: Store,
    name: str,
    write_id: str,
    request: Request,
    *,
    clock: Callable[[], float] = time.time,
) -> None:
    """Ask for the validation of a committed checkpoint, durably. Asking again changes nothing.

    Args:
        store: The run's store.
        name: The checkpoint.
        write_id: Its write id.
        request: What is asked for.
        clock: Returns the seconds since 1970.
    """
    fields = {
        "fn_kwargs": tree.encode(dict(request.fn_kwargs), path=("fn_kwargs",)),
        "timeout_s": tree.encode(request.timeout_s, path=("timeout_s",)),
        "created_s": clock(),
    }
    try:
        _create(store, check_name(name), write_id, "request", fields)
    except ExistsError:
        return


def read_request(store: Store, name: str, write_id: str) -> Request:
    """Return what was asked for.

    Raises:
        FormatError: The record cannot be read.
        MissingError: Nothing was.
    """
    key = _key(name, write_id, "request")
    fields = _read(store, key)
    kwargs, timeout_s = tree.decode(fields.get("fn_kwargs")), tree.decode(fields.get("timeout_s"))
    if type(kwargs) is not dict or not (
        timeout_s is None or (isinstance(timeout_s, int | float) and takes_float(timeout_s))
    ):
        raise FormatError(f"{key} is not a request.", path=key)
    return Request(kwargs, timeout_s)


def begin_attempt(
    store: Store,
    name: str,
    write_id: str,
    after: int,
    *,
    clock: Callable[[], float] = time.time,
) -> int:
    """Count one more attempt, before its process is started; return its number.

    Args:
        store: The run's store.
        name: The checkpoint.
        write_id: Its write id.
        after: Number of the last attempt that is known of.
        clock: Returns the seconds since 1970.
    """
    me = this_process()
    fields = {"host": me.host, "pid": me.pid, "started_s": clock()}
    number = after + 1
    while True:
        try:
            _create(store, name, write_id, f"attempt-{number}", fields)
        except ExistsError:
            number += 1  # another process is at it, too
        else:
            return number


def end_attempt(
    store: Store,
    name: str,
    write_id: str,
    number: int,
    *,
    is_stopped: bool,
    text: str,
    clock: Callable[[], float] = time.time,
) -> None:
    """Record how an attempt ended that brought no verdict.

    Args:
        store: The run's store.
        name: The checkpoint.
        write_id: Its write id.
        number: The attempt.
        is_stopped: Whether it was stopped from outside, and does not count.
        text: What happened.
        clock: Returns the seconds since 1970.
    """
    fields = {
        "outcome": _STOPPED if is_stopped else _DIED,
        "error": text,
        "ended_s": clock(),
    }
    try:
        _create(store, name, write_id, f"attempt-{number}-end", fields)
    except ExistsError:
        return


def record_verdict(
    store: Store,
    verdict: Validation,
    *,
    write_id: str,
    clock: Callable[[], float] = time.time,
) -> Validation:
    """Record a verdict, durably, and return the one that counts: the first.

    Raises:
        NewerFormatError: There is one that a newer Milepost wrote.
    """
    name = verdict.name
    key = _key(name, write_id, "verdict")
    fields = {
        "status": verdict.status.value,
        "metrics": tree.encode(dict(verdict.metrics), path=("metrics",)),
        "error": verdict.error,
        "num_attempts": verdict.num_attempts,
        "ended_s": clock(),
    }
    try:
        _create(store, name, write_id, "verdict", fields)
    except ExistsError:
        try:
            return _read_verdict(store, key, name, verdict.id)
        except DamagedError:
            store.put(key, _record(name, write_id, fields))
    return verdict


def delete_validation(store: Store, name: str, write_id: str) -> None:
    """Delete the records of a checkpoint that is gone, or is going.

    The request goes last: what it belongs to is then known as long as anything is left.
    """
    which = (name, validation_id(write_id))
    keys = []
    for entry in store.list(VALIDATIONS):
        match = _KEY.fullmatch(entry.key)
        if match is not None and (match["name"], match["id"]) == which:
            keys.append((match["kind"] == "request", entry.key))
    for _, key in sorted(keys):
        store.delete(key)


def _summary(
    store: Store, name: str, number_id: str, kinds: Mapping[str, Entry], cache: VerdictCache
) -> Validation:
    if "verdict" in kinds:
        verdict = _cached_verdict(store, kinds["verdict"], name, number_id, cache)
        if verdict is not None:
            return verdict
    numbers = sorted(
        int(kind.removeprefix("attempt-"))
        for kind in kinds
        if kind.startswith("attempt-") and not kind.endswith("-end")
    )
    ends = [kinds[f"attempt-{n}-end"].key for n in numbers if f"attempt-{n}-end" in kinds]
    num_stopped, error = _read_ends(store, ends)
    return Validation(
        name,
        number_id,
        ValidationStatus.PENDING,
        error=error,
        num_attempts=len(numbers) - num_stopped,
        last_number=numbers[-1] if numbers else 0,
    )


def _read_ends(store: Store, keys: Iterable[str]) -> tuple[int, str]:
    """Return how many attempts were stopped from outside, and what became of the last other one."""
    num_stopped, error = 0, ""
    for key in keys:
        try:
            fields = _read(store, key)
        except MissingError:
            continue
        except (FormatError, StorageError) as problem:
            raise_unreachable(store, problem)
            _log.warning("A record of a validation cannot be read: %s", problem)
            continue
        if fields.get("outcome") == _STOPPED:
            num_stopped += 1
        else:
            error = str(fields.get("error", ""))
    return num_stopped, error


def _cached_verdict(
    store: Store, entry: Entry, name: str, number_id: str, cache: VerdictCache
) -> Validation | None:
    known = cache.get(entry.key)
    if known is not None and known[0] == entry:
        return known[1]
    found: Validation | None = None
    try:
        found = _read_verdict(store, entry.key, name, number_id)
    except MissingError:
        return None
    except (FormatError, StorageError) as problem:
        raise_unreachable(store, problem)
        _log.warning("The verdict on %s cannot be read, so it counts as pending: %s", name, problem)
    cache[entry.key] = (entry, found)
    return found


def _read_verdict(store: Store, key: str, name: str, number_id: str) -> Validation:
    fields = _read(store, key)
    try:
        metrics = tree.decode(fields["metrics"])
        status = ValidationStatus(fields["status"])
        error, num_attempts = fields["error"], fields["num_attempts"]
    except (KeyError, ValueError) as problem:
        raise DamagedError(f"{key} is not a verdict: {problem}.", path=key) from problem
    if type(metrics) is not dict or not isinstance(error, str) or not is_count(num_attempts):
        raise DamagedError(f"{key} is not a verdict.", path=key)
    return Validation(name, number_id, status, metrics, error, num_attempts)


def _key(name: str, write_id: str, kind: str) -> str:
    return f"{VALIDATIONS}/{name}-{validation_id(write_id)}.{kind}.json"


def _record(name: str, write_id: str, fields: Mapping[str, Any]) -> bytes:
    return dump_record({"format": FORMAT_VERSION, "name": name, "write_id": write_id, **fields})


def _create(store: Store, name: str, write_id: str, kind: str, fields: Mapping[str, Any]) -> None:
    store.put_new(_key(name, write_id, kind), _record(name, write_id, fields))


def _read(store: Store, key: str) -> dict[str, Any]:
    fields = load_record(store.get(key, max_bytes=_MAX_RECORD_BYTES), where=key)
    check_version(fields.get("format"), where=key)
    return fields
