"""Every metric that was reported, with or without a checkpoint: lines that are only ever added.

    events/reports-00000003.jsonl      of session 3, where files can be added to
    events/reports-00000003-0001.jsonl ...   elsewhere: one object for what came since the last

The first line says which session it is and what was configured, each other one is a report. A
thread writes what has come and makes it durable, at most once a second: a report never waits for
it. What a stop of the process or a power cut can lose are the lines of the last second. The metrics
of a checkpoint are in its manifest as well, and lost with no stop.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, DeadlineError, FormatError, MissingError, storage_error
from ..format import tree
from ..stores.base import Store

__all__ = ["History", "Reported", "config_of", "read_history"]

_log = logging.getLogger("milepost")

_FOLDER = "events"
_NAME = re.compile(r"events/reports-(\d{8,})(?:-(\d{4,}))?\.jsonl")
_INTERVAL_S = 1.0
_OBJECT_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class Reported:
    """One report.

    Attributes:
        session: Number of the session.
        number: Number of the report, counted over all sessions that led to it.
        at_s: When, in seconds since 1970.
        metrics: What was reported.
    """

    session: int
    number: int
    at_s: float
    metrics: Mapping[str, Any] = field(default_factory=dict)


class History:
    """Adds to the record of one session.

    Args:
        store: The run's store.
        session: Number of the session.
        config: What was configured.
    """

    def __init__(self, store: Store, session: int, config: Mapping[str, Any]) -> None:
        self._store = store
        self._key = f"{_FOLDER}/reports-{session:08d}"
        self._path = store.local_path(f"{self._key}.jsonl")
        self._interval_s = _INTERVAL_S if self._path is not None else _OBJECT_INTERVAL_S
        self._waiting: list[str] = [_line({"format": 1, "session": session, "config": config})]
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_objects = 0
        self._is_synced = False
        self._error: CheckpointError | None = None
        # A daemon: a process that ends without closing the run has given up its last second.
        self._thread = threading.Thread(
            target=self._write_all, name="milepost-reports", daemon=True
        )
        self._thread.start()

    def add(self, number: int, metrics: Mapping[str, Any]) -> None:
        """Add a report. Never waits."""
        line = _line({"n": number, "at_s": time.time(), "metrics": tree.encode(dict(metrics))})
        with self._changed:
            self._waiting.append(line)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Write what is left.

        Raises:
            DeadlineError: It is still being written.
            CheckpointError: It could not be written.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"The last reported metrics were not written within {timeout_s:g} s.",
                safe="The checkpoints are whole, and each keeps its own metrics.",
                hint=f"See whether the place of the run answers: {self._store.url}.",
            )
        with self._changed:
            if self._waiting and self._error is not None:
                raise self._error

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                lines, is_last = len(self._waiting), self._is_closing
                text = "".join(self._waiting)
            if lines:
                self._try_write(text, lines)
            if is_last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, self._interval_s)

    def _try_write(self, text: str, lines: int) -> None:
        try:
            self._write(text.encode("ascii"))
        except CheckpointError as error:
            if self._error is None:
                _log.warning("Reported metrics could not be written, and are kept: %s", error)
            self._error = error
            return
        self._error = None
        with self._changed:
            del self._waiting[:lines]

    def _write(self, data: bytes) -> None:
        if self._path is None:
            # Tried again it is the same object, which may be there though no answer came.
            self._store.put(f"{self._key}-{self._num_objects + 1:04d}.jsonl", data)
            self._num_objects += 1
            return
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)  # noqa: PTH103, PTH120
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            start = os.fstat(fd).st_size
            try:
                _append(fd, data)
                os.fsync(fd)
                if not self._is_synced:
                    self._store.sync_folder(_FOLDER)
                    self._is_synced = True
            except (OSError, CheckpointError):
                os.ftruncate(fd, start)  # it is tried again, whole
                raise
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, operation="write", path=self._path) from error


def read_history(store: Store) -> list[Reported]:
    """Return every report of a run, session by session.

    Lines that a stop has torn are left out.
    """
    found: list[Reported] = []
    for session, line in _lines(store):
        if "n" not in line:
            continue
        try:
            metrics = tree.decode(line["metrics"])
            found.append(Reported(session, int(line["n"]), float(line["at_s"]), metrics))
        except (FormatError, KeyError, TypeError, ValueError, OverflowError) as error:
            _log.warning("A reported line of session %d cannot be read: %s", session, error)
    return found


def config_of(store: Store) -> Mapping[str, Any]:
    """Return what the newest session was configured with, or nothing."""
    configs = [line["config"] for _, line in _lines(store) if isinstance(line.get("config"), dict)]
    return configs[-1] if configs else {}


def _lines(store: Store) -> Iterator[tuple[int, dict[str, Any]]]:
    for entry in store.list(_FOLDER):
        match = _NAME.fullmatch(entry.key)
        if match is None:
            continue
        session = int(match[1])
        try:
            data = store.get(entry.key, max_bytes=1 << 32)
        except MissingError:
            continue  # deleted since it was listed
        for text in data.split(b"\n"):
            try:
                line = json.loads(text) if text else None
            except ValueError:
                _log.warning("%s holds a torn line, which is left out.", entry.key)
                continue
            if isinstance(line, dict):
                yield session, line


def _line(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


def _append(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
