"""A store that stops, fails, or loses an answer at a chosen operation.

Run a program once over a :class:`FaultStore` without faults to learn its operations, then once for
each of them with a fault there, and look each time at what a fresh reader of the store below sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar, final

from ..errors import CheckpointError
from ..stores.base import Entry, Names, Reader, Store, Writer

__all__ = ["Crash", "Fault", "FaultStore"]

T = TypeVar("T")


class Crash(BaseException):
    """The process ended here. A ``BaseException``, so that no error handler goes on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one operation.

    Attributes:
        at: Number of the operation, counted from 1.
        is_after: Whether the operation is carried out first. With an error this is an answer that
            got lost.
        error: What is raised; ``None`` stops the process.
    """

    at: int
    is_after: bool = False
    error: CheckpointError | None = None


@final
class FaultStore:
    """Passes everything on to another store, and counts.

    After a stop nothing reaches the store below any more, as from a process that has ended.

    Args:
        store: Keeps the bytes.
        faults: What goes wrong, and when.
        before: Called with the number and the text of each operation before it is carried out: to
            let something else happen just then, or to wait for it.

    Attributes:
        operations: What was asked for so far, such as ``"put_new ep1/manifest.json"``.
        is_stopped: Whether the process has ended.
    """

    def __init__(
        self,
        store: Store,
        faults: Sequence[Fault] = (),
        *,
        before: Callable[[int, str], None] | None = None,
    ) -> None:
        self._store = store
        self._before = before
        self._faults = {fault.at: fault for fault in faults}
        self._lock = Lock()
        self.url = store.url
        self.traits = store.traits
        self.operations: list[str] = []
        self.is_stopped = False

    def put_new(self, key: str, data: bytes) -> None:
        """Count, and pass on."""
        self.do(f"put_new {key}", lambda: self._store.put_new(key, data))

    def put(self, key: str, data: bytes) -> None:
        """Count, and pass on."""
        self.do(f"put {key}", lambda: self._store.put(key, data))

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Count, and pass on."""
        return self.do(f"get {key}", lambda: self._store.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> Entry:
        """Count, and pass on."""
        return self.do(f"head {key}", lambda: self._store.head(key))

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Count, and pass on."""
        return iter(self.do(f"list {folder}", lambda: tuple(self._store.list(folder))))

    def folders(self, folder: str = "") -> Names:
        """Count, and pass on."""
        return self.do(f"folders {folder}", lambda: self._store.folders(folder))

    def delete(self, key: str) -> None:
        """Count, and pass on."""
        self.do(f"delete {key}", lambda: self._store.delete(key))

    def rename(self, key: str, new_key: str) -> None:
        """Count, and pass on."""
        self.do(f"rename {key} {new_key}", lambda: self._store.rename(key, new_key))

    def link(self, key: str, new_key: str) -> None:
        """Count, and pass on."""
        self.do(f"link {key} {new_key}", lambda: self._store.link(key, new_key))

    def point(self, key: str, target: str) -> None:
        """Count, and pass on."""
        self.do(f"point {key} {target}", lambda: self._store.point(key, target))

    def create_writer(self, key: str, size_bytes: int) -> Writer:
        """Count, and pass on."""
        make = f"create_writer {key}"
        writer = self.do(make, lambda: self._store.create_writer(key, size_bytes))
        return FaultWriter(self, key, writer)

    def open_reader(self, key: str) -> Reader:
        """Count, and pass on."""
        reader = self.do(f"open_reader {key}", lambda: self._store.open_reader(key))
        return FaultReader(self, key, reader)

    def sync_folder(self, folder: str) -> None:
        """Count, and pass on."""
        self.do(f"sync_folder {folder}", lambda: self._store.sync_folder(folder))

    def local_path(self, key: str) -> str | None:
        """Pass on."""
        return self._store.local_path(key)

    def sweep_temporary(self, max_age_s: float, folder: str = "") -> Names:
        """Pass on, if the store below makes temporary files."""
        sweep = getattr(self._store, "sweep_temporary", None)
        if not callable(sweep):
            return []
        return self.do("sweep_temporary", lambda: [str(path) for path in sweep(max_age_s, folder)])

    def do(self, operation: str, action: Callable[[], T]) -> T:
        """Carry out one counted operation, or what was planned for it."""
        with self._lock:
            if self.is_stopped:
                raise Crash(operation)
            self.operations.append(operation)
            number = len(self.operations)
            fault = self._faults.get(number)
            if fault is not None and fault.error is None and not fault.is_after:
                self.is_stopped = True
        if self._before is not None:
            self._before(number, operation)
        if fault is not None and not fault.is_after:
            raise fault.error or Crash(operation)
        try:
            return action()
        finally:
            if fault is not None:
                self._answer_with(fault, operation)

    def _answer_with(self, fault: Fault, operation: str) -> None:
        """Put the planned end in the place of whatever the operation answered."""
        if fault.error is None:
            self.is_stopped = True
        raise fault.error or Crash(operation)


@final
class FaultWriter:
    """Counts the operations of a writer."""

    def __init__(self, store: FaultStore, key: str, writer: Writer) -> None:
        self._store = store
        self._key = key
        self._writer = writer

    def write_at(self, offset: int, data: memoryview) -> None:
        """Count, and pass on."""
        self._store.do(f"write_at {self._key}", lambda: self._writer.write_at(offset, data))

    def close(self, size_bytes: int | None = None) -> None:
        """Count, and pass on."""
        self._store.do(f"close {self._key}", lambda: self._writer.close(size_bytes))

    def abort(self) -> None:
        """Pass on, unless the process has ended."""
        if not self._store.is_stopped:
            self._writer.abort()


@final
class FaultReader:
    """Counts the operations of a reader."""

    def __init__(self, store: FaultStore, key: str, reader: Reader) -> None:
        self._store = store
        self._key = key
        self._reader = reader
        self.size_bytes = reader.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Count, and pass on."""
        self._store.do(f"read_into {self._key}", lambda: self._reader.read_into(offset, buffer))

    def close(self) -> None:
        """Pass on."""
        self._reader.close()
