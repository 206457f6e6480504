"""Bytes by key: what a place must be able to do.

A store is a flat map from keys (relative paths with ``/``) to bytes. Small records go through
``put_new`` / ``put`` / ``get``; parts go through a writer and a reader that move blocks.

Contract, for every store:

- ``put_new`` is exclusive: of two callers with one key exactly one succeeds, and after it returns
  the bytes survive a power cut. A reader sees all of them or none.
- ``put`` replaces in one step: a reader sees the old bytes or the new, never a mixture.
- ``Writer.close`` returns after the bytes are durable. The key's *name* is durable after
  ``sync_folder`` on its folder.
- ``delete`` of a missing key is no error.
- Errors are of the typed tree; a refused access is never reported as a missing key.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = [
    "UNSEEN",
    "BegunUpload",
    "BegunUploads",
    "CachedReader",
    "Entries",
    "Entry",
    "LastingWriter",
    "LendingReader",
    "NamingStrangers",
    "Reader",
    "ShowingUploads",
    "Store",
    "StreamingReader",
    "Traits",
    "Writer",
]

Names = list[str]
"""Folder names. Inside a class with a method called ``list`` the type needs another name."""

_Names = list[str]  # within Store, ``list`` is the method


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a listing.

    Attributes:
        key: The key.
        size_bytes: Size of its bytes.
        modified_s: Seconds since 1970 by the store's own clock.
    """

    key: str
    size_bytes: int
    modified_s: float


Entries = list[Entry]
"""A listing; see ``Names``."""


UNSEEN = "not visible through this client; a rule of the bucket should remove them after some days"
"""Said of uploads that have not ended, of a place that may have some and cannot show them."""


@dataclass(frozen=True, slots=True)
class BegunUpload:
    """An upload in parts that has not ended: it goes on, or whoever sent it is gone.

    Attributes:
        key: What it will be.
        upload_id: What the service calls it.
        begun_s: When it was begun, in seconds since 1970 by the store's own clock.
    """

    key: str
    upload_id: str
    begun_s: float


@dataclass(frozen=True, slots=True)
class BegunUploads:
    """What a service shows of uploads that have not ended.

    Attributes:
        found: The uploads.
        now_s: When it was asked, by the same clock; ``None`` if it did not say.
        is_whole: Whether there are surely no others. Some services show one only to whoever asks
            for its very key.
    """

    found: tuple[BegunUpload, ...]
    now_s: float | None
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """What a place can do.

    Attributes:
        is_local: Whether keys are files that other programs can open; see ``Store.local_path``.
        exclusive_create: Whether ``put_new`` is exclusive among processes.
        hard_links: Whether ``link`` shares bytes instead of copying them.
        copies_itself: Whether ``link`` has the place copy them, so that they do not pass through
            here.
        compares_uploads: Whether a part that came to harm on the way there is refused. Where it is
            not, only reading it back tells.
        symlinks: Whether ``point`` makes a link that people can follow.
        streams: Whether readers hand out long ranges as they come; see ``StreamingReader``.
    """

    is_local: bool
    exclusive_create: bool
    hard_links: bool
    symlinks: bool
    copies_itself: bool = False
    compares_uploads: bool = True
    streams: bool = False


class Writer(Protocol):
    """Writes one new key block by block. Used by several threads at once."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``.

        All offsets are multiples of ``digest.BLOCK_BYTES`` and all lengths but the last are too.
        ``data`` is page aligned in memory, and readable up to the next page border.
        """

    def close(self, size_bytes: int | None = None) -> None:
        """Make the bytes durable and the key visible under its name.

        Args:
            size_bytes: How many bytes it came to, where these are fewer than were expected: what
                was written, from its beginning on.
        """

    def abort(self) -> None:
        """Drop what was written. Never raises; safe to call twice and after ``close``."""


@runtime_checkable
class LastingWriter(Writer, Protocol):
    """What a writer may be able to do besides: send memory from where it is, without a copy."""

    def refer_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` as ``write_at`` does, and return before it was sent.

        ``data`` must stay as it is until ``close`` or ``abort`` has returned.
        """


class Reader(Protocol):
    """Reads ranges of one key. Used by several threads at once."""

    size_bytes: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on.

        Offsets are multiples of ``header.PAGE_BYTES``. The buffer is page aligned in memory.

        Raises:
            DamagedError: The key ends too early.
        """

    def close(self) -> None:
        """Release the file or connection."""


@runtime_checkable
class CachedReader(Reader, Protocol):
    """What a reader may be able to do besides: fill any memory with bytes that are at hand."""

    def is_cached(self, offset: int, length: int) -> bool:
        """Return whether a range seems to be in memory already, so that reading is copying."""

    def copy_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` as ``read_into`` does; neither it nor ``offset`` need be aligned."""


@runtime_checkable
class LendingReader(Reader, Protocol):
    """What a reader may be able to do besides: hand out memory that it has, without a copy."""

    def lend(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes, which stays as it is while somebody has a view of it.

        Raises:
            DamagedError: The key ends too early.
        """


@runtime_checkable
class StreamingReader(Reader, Protocol):
    """What a reader may be able to do besides: hand out a long range as it comes."""

    def stream(self, offset: int, length: int) -> Generator[memoryview, None, None]:
        """Yield a range of bytes in pieces of any size; whoever does not take all closes it.

        Raises:
            DamagedError: The key ends too early.
        """


@runtime_checkable
class Store(Protocol):
    """A place for runs. See the module's contract."""

    url: str
    traits: Traits

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data``, durably, or raise ``ExistsError``."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key`` in one durable step."""

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``. Raises ``MissingError``; ``FormatError`` if it is larger."""

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder at any depth, in the order of the keys.

        ``"ep1"`` yields ``ep1/a`` and never ``ep10/a``. A missing folder yields nothing. Temporary
        files of the store itself are left out, and names of others that are no keys.
        """

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""

    def delete(self, key: str) -> None:
        """Remove ``key``; on a file system also its folder once that is empty."""

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist: one durable step if it can be."""

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key, sharing them if the store can, else copying.

        After an error there is no ``new_key``, unless the error says that there was one before.
        """

    def point(self, key: str, target: str) -> None:
        """Make ``key`` name ``target`` for people: a symlink, or a text with the target's name."""

    def create_writer(self, key: str, size_bytes: int) -> Writer:
        """Begin to write a new key. Raises ``ExistsError`` if it is there.

        Args:
            key: The key.
            size_bytes: Its size; at most that, if ``Writer.close`` is told how much it came to.
        """

    def open_reader(self, key: str) -> Reader:
        """Open a key for reading. Raises ``MissingError``."""

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder, and of the folder itself, durable."""

    def local_path(self, key: str) -> str | None:
        """Return the file of a key if this store keeps files, else ``None``."""


@runtime_checkable
class NamingStrangers(Protocol):
    """What a store may be able to do besides: tell what its listings leave out."""

    def strangers(self, folder: str = "") -> _Names:
        """Return what lies below a folder under names that are no keys, sorted.

        Of a folder with such a name only that is told, with a slash at its end.
        """


@runtime_checkable
class ShowingUploads(Protocol):
    """What a store may be able to do besides: show uploads in parts that have not ended."""

    def why_uploads_are_unseen(self) -> str:
        """Return in plain words why they cannot be shown, and what becomes of them; or ``""``."""

    def begun_uploads(self, start: str = "") -> BegunUploads:
        """Return the uploads to keys that begin with ``start``.

        Raises:
            AccessError: They may not be listed.
            StorageError: The service does not list them, or cannot be reached.
            UsageError: They cannot be shown, see ``why_uploads_are_unseen``.
        """

    def upload_written_s(self, upload: BegunUpload) -> float:
        """Return when anything of an upload came last, by the store's own clock.

        Infinity if it has ended meanwhile.
        """

    def end_upload(self, upload: BegunUpload) -> None:
        """Drop an upload with all of its parts; one that has ended is no error."""
