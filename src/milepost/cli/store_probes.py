"""Looks at a place in an object store: what we may do there, and what it does.

Everything is written below one hidden name, which is removed afterwards, also after Ctrl-C. A
refused right does not end the look: what else is allowed there says what will fail.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from ..errors import AccessError, CheckpointError, ExistsError, MissingError
from ..format.digest import BLOCK_BYTES
from ..stores.base import Store
from ..stores.pages import page_memory
from .probes import FAIL, OK, WARN, Check
from .render import size_text

__all__ = ["probe_store"]

_NUM_THREADS = 4
_SIZE_BYTES = 4 * BLOCK_BYTES + 5  # so that the last block is a short one
_NUM_REQUESTS = 5
_SLOW_S = 0.25
_MAX_SKEW_S = 5.0
"""Times of objects are often whole seconds."""


@dataclass(slots=True)
class _Place:
    store: Store
    folder: str
    content: memoryview
    keys: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        """Return the key of a probe, which is removed in the end."""
        key = f"{self.folder}/{name}"
        self.keys.add(key)
        return key


def probe_store(store: Store) -> Iterator[Check]:
    """Try what a run needs of an object store, and tell each finding as soon as it is made."""
    place = _Place(store, f".milepost-doctor-{secrets.token_hex(8)}", _content())
    try:
        yield _attempt(_listing, place)
        written = _attempt(_write, place)
        yield written
        if written.status != FAIL:
            for probe in _PROBES:
                yield _attempt(probe, place)
    finally:
        left = _remove(place)
    if left and written.status != FAIL:
        text = f"{len(left)} objects below {store.url}/{place.folder} are left"
        yield Check("tidied up", WARN, text, "Delete them.")


def _attempt(probe: Callable[[_Place], Check], place: _Place) -> Check:
    name, hint = _NAMES[probe]
    try:
        return probe(place)
    except AccessError as error:
        return Check(name, FAIL, f"refused: {_first_line(error)}", hint)
    except CheckpointError as error:
        return Check(name, FAIL, _first_line(error), hint)


def _first_line(error: CheckpointError) -> str:
    return error.what.splitlines()[0]


def _listing(place: _Place) -> Check:
    found = list(place.store.list(place.folder))
    return Check("list", OK, "what is there is shown" if not found else "")


def _write(place: _Place) -> Check:
    place.store.put(place.key("small"), b"small")
    return Check("writable", OK, place.store.url)


def _read(place: _Place) -> Check:
    found = place.store.get(place.key("small"))
    if found != b"small":
        return Check("read", FAIL, "other bytes came back", _NAMES[_read][1])
    return Check("read", OK, "what was written comes back")


def _replace(place: _Place) -> Check:
    key = place.key("small")
    place.store.put(key, b"other")
    if place.store.get(key) != b"other":
        hint = "Metadata and pins may be seen as they were before."
        return Check("replace", WARN, "the old bytes came back at first", hint)
    return Check("replace", OK, "the new bytes are seen at once")


def _list_after_write(place: _Place) -> Check:
    key = place.key("listed")
    place.store.put(key, b"1")
    if key in {entry.key for entry in place.store.list(place.folder)}:
        return Check("list after write", OK, "new objects are shown at once")
    return Check(
        "list after write", FAIL, "a new object was not shown", _NAMES[_list_after_write][1]
    )


def _delete(place: _Place) -> Check:
    key = place.key("listed")
    place.store.delete(key)
    try:
        place.store.head(key)
    except MissingError:
        return Check("delete", OK, "what is deleted is gone at once")
    return Check("delete", FAIL, "a deleted object is still there", _NAMES[_delete][1])


def _exclusive_create(place: _Place) -> Check:
    key = place.key("once")
    place.store.put_new(key, b"1")
    try:
        place.store.put_new(key, b"2")
    except ExistsError:
        if place.store.traits.exclusive_create:
            return Check("exclusive create", OK, "of two writers one wins")
    hint = "Single writer only: never let two jobs save to one run there at the same time."
    return Check("exclusive create", WARN, "what is there already is not refused", hint)


def _multipart(place: _Place) -> Check:
    content = place.content
    key = place.key("large")
    place.store.delete(key)
    started_s = time.perf_counter()
    writer = place.store.create_writer(key, len(content))
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            starts = range(0, len(content), BLOCK_BYTES)
            list(pool.map(lambda at: writer.write_at(at, content[at : at + BLOCK_BYTES]), starts))
        writer.close()
    except BaseException:
        writer.abort()
        raise
    took_s = time.perf_counter() - started_s
    found = place.store.head(key).size_bytes
    if found != len(content):
        text = f"{found:,} of {len(content):,} bytes are there"
        return Check("upload", FAIL, text, _NAMES[_multipart][1])
    return Check("upload", OK, _speed(len(content), took_s))


def _ranges(place: _Place) -> Check:
    content = place.content
    memory = memoryview(page_memory(len(content)))[: len(content)]
    started_s = time.perf_counter()
    with (
        closing(place.store.open_reader(place.key("large"))) as reader,
        ThreadPoolExecutor(_NUM_THREADS) as pool,
    ):
        starts = range(0, len(content), BLOCK_BYTES)
        list(
            pool.map(
                lambda at: reader.read_into(at, memory[at : at + BLOCK_BYTES]),
                starts,
            )
        )
    took_s = time.perf_counter() - started_s
    if memory != content:
        return Check("ranged read", FAIL, "other bytes came back", _NAMES[_ranges][1])
    return Check("ranged read", OK, _speed(len(content), took_s))


def _copy(place: _Place) -> Check:
    key = place.key("copy")
    place.store.link(place.key("large"), key)
    if place.store.head(key).size_bytes != _SIZE_BYTES:
        return Check("copy", FAIL, "the copy has another size", _NAMES[_copy][1])
    return Check("copy", OK, "objects can be copied without sending them")


def _latency(place: _Place) -> Check:
    seconds = []
    for _ in range(_NUM_REQUESTS):
        started_s = time.perf_counter()
        place.store.get(place.key("small"))
        seconds.append(time.perf_counter() - started_s)
    median_s = statistics.median(seconds)
    text = f"{median_s * 1000:.0f} ms, the median of {_NUM_REQUESTS} small reads"
    if median_s <= _SLOW_S:
        return Check("latency", OK, text)
    return Check("latency", WARN, text, "A save makes a dozen requests in a row; save less often.")


def _clock(place: _Place) -> Check:
    before_s = time.time()
    place.store.put(place.key("now"), b"")
    after_s = time.time()
    stamp_s = place.store.head(place.key("now")).modified_s
    skew_s = max(before_s - stamp_s, stamp_s - after_s, 0.0)
    if skew_s <= _MAX_SKEW_S:
        return Check("clock", OK, "agrees with that of the service")
    hint = "Requests may be refused, and ages are shown wrong. Set the clock of this machine."
    return Check("clock", WARN, f"{skew_s:.0f} s away from that of the service", hint)


def _content() -> memoryview:
    """Return bytes that nobody can make smaller, in pages."""
    memory = page_memory(_SIZE_BYTES)
    memory[:_SIZE_BYTES] = os.urandom(_SIZE_BYTES)
    return memoryview(memory)[:_SIZE_BYTES]


def _speed(num_bytes: int, took_s: float) -> str:
    rate = num_bytes / max(took_s, 1e-9)
    return f"{size_text(num_bytes)} in {took_s:.2f} s, {size_text(int(rate))}/s"


def _remove(place: _Place) -> list[str]:
    """Delete what was written; return what could not be deleted."""
    left = []
    for key in sorted(place.keys):
        try:
            place.store.delete(key)
        except CheckpointError:
            left.append(key)
    return left


_NAMES: dict[Callable[[_Place], Check], tuple[str, str]] = {
    _listing: ("list", "Nothing can be found again there: no resume, no ls, no retention."),
    _write: ("writable", "Nothing can be saved there."),
    _read: ("read", "No run there can be resumed, and no checkpoint be loaded."),
    _replace: ("replace", "Metadata, pins and the pointer to the newest one cannot be replaced."),
    _list_after_write: ("list after write", "A resume may not see the newest checkpoint."),
    _delete: ("delete", "Retention and prune will fail, and attempts that failed stay."),
    _exclusive_create: ("exclusive create", "No run can be begun there."),
    _multipart: ("upload", "Checkpoints over 8 MiB cannot be saved there."),
    _ranges: ("ranged read", "Checkpoints cannot be loaded from there."),
    _copy: ("copy", "Files that checkpoints share are sent again by cp and sync."),
    _latency: ("latency", "Saves may fail."),
    _clock: ("clock", "Requests may be refused."),
}
_PROBES = (
    _read,
    _replace,
    _list_after_write,
    _delete,
    _exclusive_create,
    _multipart,
    _ranges,
    _copy,
    _latency,
    _clock,
)
