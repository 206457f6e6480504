"""A store in a bucket of S3, GCS or Azure, or of anything that speaks one of their protocols.

What makes it durable is the service: an object is there, whole and durable, when its upload has
been answered. What makes ``put_new`` exclusive is a condition on the upload, "only if there is
none". An answer may get lost on the way, and the try after it is refused because of our own object:
so each object carries a random mark, and a refusal is believed only if the mark is another's. A
record carries its checksum too, so that bits which flip on the way are found on either way. Where
the service does not compare what came, the record is read back; whatever bears another mark by then
is what another process has put there since, and is left alone.

Records are small and uploaded at once. Parts are streamed in several pieces while they are written,
and are visible when the last piece has been answered; what was begun and not ended is dropped.

Single requests are tried again here, see ``tries.py``; those for the pieces of an upload are tried
again by the client, which holds their bytes. No request carries more than a piece, and each has the
time that its bytes may take: so a connection that stands still is noticed after the time of a
piece, however large the object is, and sooner while reading.

Together with ``clients.py`` the only module that imports obstore. Uploads that have not ended are
seen by another client; see ``unended.py``.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final
from urllib.parse import urlsplit

import obstore

from ..errors import (
    AccessError,
    CheckpointError,
    DamagedError,
    DeadlineError,
    ExistsError,
    FormatError,
    MissingError,
    StorageError,
)
from ..format.digest import BLOCK_BYTES, crc32c
from ..format.layout import is_key
from .address import trimmed
from .base import BegunUpload, BegunUploads, Entries, Entry, Names
from .bucket import BucketStore
from .clients import Clients
from .feed import BlockFeed
from .forked import note_request
from .pace import pace_of
from .probing import refuses_existing
from .ranges import StreamReader
from .refusals import UnknownAnswerError, typed_error, whole_range
from .streams import Begun, resumed
from .tries import Tries
from .unended import Unended

__all__ = ["CloudStore"]

T = TypeVar("T")

_log = logging.getLogger("milepost")
_MARK = "mpwrite"
_CHECKSUM = "mpcrc32c"
_SILENT_S = 20.0
_SLOWEST_BYTES_S = 100_000
_RECORD_BYTES = 1024 * 1024
_MAX_PIECES = 9_000
_PUTS = 2
"""A record that came to harm is put once more. It is not deleted: it stands for one before it."""

_STREAMED_BYTES = 1024 * 1024
"""Pieces of a range that is read. They are checked and copied while the cache still has them."""

_RETRIES = 12
_RETRY_TIMEOUT_S = 120.0
_MAX_COPY_BYTES = 5 * 1024**3
_PIECES_AT_LEAST, _PIECE_BLOCKS = 16, 2
"""From 256 MiB on two blocks a piece. Each request costs a service some work beside its bytes, and
a wait for its answer; but a connection that stands still is noticed after the time of a piece."""

_UPLOADS_AT_ONCE = 8
"""Pieces of one object on their way. One connection to S3 takes about 100 MB/s."""


@final
class CloudStore(BucketStore):
    """Keeps each key as an object below a prefix of a bucket.

    Args:
        url: Such as ``s3://bucket/prefix``, ``gs://...``, ``az://...`` or ``abfss://...``.
        config: Options of the client by the names that obstore gives them, such as ``endpoint``.
            What is missing comes from the environment, as for the tools of the service.
        retry_timeout_s: How long one request is tried again.
        max_retries: How often.
        silent_timeout_s: How long a connection may give nothing before it counts as broken.
        slowest_bytes_s: What each connection carries at least; a request gets the time that its
            bytes take then, on top of ``silent_timeout_s``.

    Raises:
        UsageError: The client cannot be made of this.
    """

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Any] | None = None,
        retry_timeout_s: float = _RETRY_TIMEOUT_S,
        max_retries: int = _RETRIES,
        silent_timeout_s: float = _SILENT_S,
        slowest_bytes_s: int = _SLOWEST_BYTES_S,
    ) -> None:
        super().__init__(trimmed(url), exclusive_create=True)
        self._retry_timeout_s = retry_timeout_s
        self._clients = Clients(
            self.url,
            config or {},
            max_retries=max_retries,
            retry_timeout_s=retry_timeout_s,
            silent_timeout_s=silent_timeout_s,
            slowest_bytes_s=slowest_bytes_s,
        )
        self._unended = Unended(self._clients, self.url)
        self.traits = replace(
            self.traits,
            copies_itself=not self._clients.is_azure,
            compares_uploads=self._clients.are_uploads_checked,
            streams=True,
        )
        self._pace = pace_of(f"{self._clients.endpoint} {'/'.join(urlsplit(self.url)[:2])}")
        self._tries = Tries(
            self._pace,
            max_retries=max_retries,
            timeout_s=retry_timeout_s,
            errors=(obstore.exceptions.BaseError, OSError, UnknownAnswerError),
        )
        self._probing = threading.Lock()
        self._was_probed = False
        self._is_bucket_known = False

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data`` or raise ``ExistsError``."""
        self._check(key)
        self._probe_once()
        if self.traits.exclusive_create:
            self._create(key, data)
        else:
            self._create_after_look(key, data)

    def _create(self, key: str, data: bytes) -> None:
        mark = secrets.token_hex(16)
        try:
            self._send("create", key, data, mark=mark)
        except (ExistsError, StorageError, DeadlineError) as error:
            # It may be ours: the answer to a first try got lost.
            if not self._is_ours(key, mark, is_refused=isinstance(error, ExistsError)):
                raise
        if not self._is_whole(key, data, mark):
            self.delete(key)
            raise self._harmed(key, "and was removed")

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key``."""
        self._check(key)
        for _ in range(_PUTS):
            mark = secrets.token_hex(16)
            self._send("put", key, data, mark=mark)
            if self._is_whole(key, data, mark):
                return
        raise self._harmed(key, f"{_PUTS} times")

    def _send(self, operation: str, key: str, data: bytes, *, mark: str) -> None:
        client, body = self._clients.get("write", len(data)), bytes(data)
        attributes = {_MARK: mark, _CHECKSUM: f"{crc32c(body):08x}"}
        mode: Any = "create" if operation == "create" else "overwrite"
        self._ask(
            operation,
            key,
            lambda: obstore.put(
                client, key, body, mode=mode, attributes=attributes, use_multipart=False
            ),
        )

    def _is_whole(self, key: str, data: bytes, mark: str) -> bool:
        """Read a record back if nobody else compares what was sent with what came.

        Returns:
            Whether it is what was sent, or what another process has put there since.
        """
        if self._clients.are_uploads_checked or len(data) > _RECORD_BYTES:
            return True
        client = self._clients.get("read", BLOCK_BYTES)

        def look() -> None:
            found = obstore.get(client, key)
            size_bytes = _checked(found.meta)["size"]
            if found.attributes.get(_MARK, mark) != mark:
                return
            if size_bytes != len(data) or bytes(found.bytes()) != data:
                raise self._harmed(key, "or back")

        try:
            self._ask("get", key, look)  # twice, if need be: it may be the way back
        except DamagedError:
            return False
        return True

    def _harmed(self, key: str, how: str) -> DamagedError:
        return DamagedError(
            f"{self._name(key)} came to harm on the way there, {how}.",
            safe="Earlier checkpoints are intact.",
            operation="put",
            path=key,
        )

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""
        self._check(key)
        client = self._clients.get("read", BLOCK_BYTES)

        def get() -> bytes:
            found = obstore.get(client, key)
            size_bytes = _checked(found.meta)["size"]
            if size_bytes > max_bytes:
                raise FormatError(
                    f"{key} holds {size_bytes:,} bytes; at most {max_bytes:,} are read.", path=key
                )
            if size_bytes <= BLOCK_BYTES:
                data = bytes(found.bytes())
            else:
                blocks = range(0, size_bytes, BLOCK_BYTES)
                data = b"".join(
                    self.read_range(key, start, min(BLOCK_BYTES, size_bytes - start))
                    for start in blocks
                )
            self._refuse_harmed(key, data, size_bytes, found.attributes.get(_CHECKSUM))
            return data

        return self._ask("get", key, get)

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        self._check(key)
        client = self._clients.get("read")
        try:
            return _entry(self._ask("look at", key, lambda: _checked(obstore.head(client, key))))
        except MissingError:
            self._refuse_missing_bucket(key)
            raise
        except StorageError as error:
            if error.facts["code"] is None and error.facts["status"] == 400:
                # The answer to a look has no body, and so no reason; that to a read has.
                self._ask("look at", key, lambda: obstore.get(client, key))
            raise

    def _list_all(self, folder: str) -> Entries:
        """Return every object below a folder, whatever its name."""
        prefix = f"{self._check(folder)}/" if folder else None
        client = self._clients.get("read")

        def pages() -> Entries:
            listing = obstore.list(client, prefix=prefix, chunk_size=1000)
            with self._naming_unreadable(folder):
                return [_entry(meta) for page in listing for meta in page]

        return self._ask("list", folder, pages)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        prefix = f"{self._check(folder)}/" if folder else None
        client = self._clients.get("read")

        def look() -> Any:
            with self._naming_unreadable(folder):
                return obstore.list_with_delimiter(client, prefix=prefix)

        listing = self._ask("list", folder, look)
        names = (one.rstrip("/").rpartition("/")[2] for one in listing["common_prefixes"])
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._check(key)
        client = self._clients.get("write")
        try:
            self._ask("delete", key, lambda: obstore.delete(client, key))
        except MissingError:
            return  # some services say so

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key: a copy that the service makes.

        Azure is sent the bytes again: it answers when it has begun to copy.
        """
        self._check(key)
        self._refuse_existing(new_key)
        size_bytes = self.head(key).size_bytes
        if size_bytes > _MAX_COPY_BYTES and self.url.startswith(("s3://", "s3a://")):
            raise StorageError(
                f"{self._name(key)} has {size_bytes:,} bytes; S3 copies {_MAX_COPY_BYTES:,} at "
                "most.",
                operation="copy",
                path=key,
            )
        if self._clients.is_azure:
            self._send_again(key, new_key, size_bytes)
            return
        client = self._clients.get("copy", size_bytes)
        try:
            self._ask("copy", key, lambda: obstore.copy(client, key, new_key))
            found_bytes = self.head(new_key).size_bytes
            if found_bytes != size_bytes:
                raise DamagedError(
                    f"The copy {self._name(new_key)} has {found_bytes:,} of {size_bytes:,} bytes.",
                    operation="copy",
                    path=new_key,
                )
        except CheckpointError as error:
            # It may have been made all the same, and would be in the way of what is written then.
            try:
                self.delete(new_key)
            except CheckpointError as second:
                _log.warning("After %s: %s may be left: %s", error, self._name(new_key), second)
            raise

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Upload an object in several pieces; one of that name is replaced."""
        self._check(key)
        is_lasting = isinstance(pieces, BlockFeed) and pieces.begins_lasting()
        piece_bytes = _piece_bytes(size_bytes, is_lasting=is_lasting)
        client, mark = self._clients.get("upload", piece_bytes), secrets.token_hex(16)
        taken_bytes = 0

        def paced() -> Iterator[bytes | memoryview]:
            nonlocal taken_bytes
            taken_bytes = 0
            for piece in pieces:
                self._pace.wait(self._pace.clock() + self._retry_timeout_s)
                taken_bytes += len(piece)
                yield piece

        def may_repeat(error: CheckpointError) -> bool:
            # What the client has tried again by itself is given up on.
            is_fresh = bool(error.facts["tries"] == 1)
            is_whole = isinstance(pieces, BlockFeed) and pieces.begin_again()
            return is_fresh and (is_whole or taken_bytes == 0)

        try:
            self._ask(
                "upload",
                key,
                lambda: obstore.put(
                    client,
                    key,
                    paced(),
                    attributes={_MARK: mark},
                    use_multipart=True,
                    chunk_size=piece_bytes,
                    max_concurrency=_UPLOADS_AT_ONCE,
                ),
                max_retries=1,
                timeout_s=math.inf,  # each piece has its time, and there may be many
                may_repeat=may_repeat,
            )
        except StorageError:
            # The answer to the last request of all may have got lost.
            whole_bytes = pieces.size_bytes if isinstance(pieces, BlockFeed) else size_bytes
            is_all = taken_bytes == whole_bytes
            if not (is_all and self._is_ours(key, mark, is_refused=False)):
                raise

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes that a key has, all of them. Used by the reader."""
        client = self._clients.get("read", length)

        def read() -> memoryview:
            found = memoryview(obstore.get_range(client, key, start=start, length=length))
            return whole_range(found, length)

        return self._ask("read", key, read)

    def open_reader(self, key: str) -> StreamReader:
        """Open a key for reading."""
        return StreamReader(self, key, self.head(key).size_bytes)

    def stream_range(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """Return a range of bytes that a key has, as they come. Used by the reader."""
        client, stop = self._clients.get("read", length), start + length

        def ask(at: int) -> Begun:
            found = obstore.get(client, key, options={"range": (at, stop)})
            _checked(found.meta)
            stream = iter(found.stream(min_chunk_size=_STREAMED_BYTES))
            return next(stream, b""), stream

        return resumed(
            lambda at: self._ask("read", key, partial(ask, at)),
            start=start,
            stop=stop,
            errors=(obstore.exceptions.BaseError, OSError),
            name=self._name(key),
            pause=self._tries.pause,
        )

    def why_uploads_are_unseen(self) -> str:
        """Return why uploads that have not ended cannot be shown, if they cannot."""
        return self._unended.why_unseen()

    def begun_uploads(self, start: str = "") -> BegunUploads:
        """Return the uploads to keys that begin with ``start`` and have not ended."""
        self._refuse_fork()
        return self._unended.uploads().find(start)

    def upload_written_s(self, upload: BegunUpload) -> float:
        """Return when anything of an upload came last."""
        return self._unended.uploads().written_s(upload)

    def end_upload(self, upload: BegunUpload) -> None:
        """Drop an upload with all of its parts; one that has ended is no error."""
        self._unended.uploads().end(upload)

    def _probe_once(self) -> None:
        """Find out whether the place refuses to create what is there.

        One that does not is used with a look before each creation instead, which is safe with a
        single writer only.
        """
        with self._probing:
            if self._was_probed:
                return
            if not refuses_existing(self._create, self.delete, url=self.url):
                self.traits = replace(self.traits, exclusive_create=False)
                self._warn_of_one_writer()
            self._was_probed = True

    @contextmanager
    def _naming_unreadable(self, folder: str) -> Iterator[None]:
        """Say what is wrong where the client cannot read the names; trying again does not help."""
        try:
            yield
        except obstore.exceptions.InvalidPathError as error:
            raise StorageError(
                f"{self._name(folder)} cannot be listed: an object there has a name with an empty "
                f"part, or with '.' or '..' for a part.",
                hint="Rename it, or remove it, with a tool of the service.",
                operation="list",
                path=folder,
            ) from error

    def _refuse_harmed(self, key: str, data: bytes, size_bytes: int, checksum: str | None) -> None:
        """Refuse bytes that are not what was sent, as far as the object says what that was."""
        if len(data) != size_bytes:
            said = f"with {len(data):,} of {size_bytes:,} bytes"
        elif checksum is not None and checksum != f"{crc32c(data):08x}":
            said = "with other bytes than were sent"
        else:
            return
        raise DamagedError(f"{self._name(key)} came {said}.", operation="get", path=key)

    def _refuse_missing_bucket(self, key: str) -> None:
        """Tell a missing object from a missing bucket, which a look at an object does not."""
        if self._is_bucket_known:
            return
        client = self._clients.get("read")
        try:
            self._ask("look at", key, lambda: obstore.list(client, prefix="probe-").collect())
        except AccessError:
            self._is_bucket_known = True  # or it could not refuse

    def _is_ours(self, key: str, mark: str, *, is_refused: bool) -> bool:
        """Return whether an object is the one that was sent with a mark.

        Raises:
            CheckpointError: It cannot be looked at, and the service has said that there is one: so
                it may be ours or not.
        """
        client = self._clients.get("read", BLOCK_BYTES)
        try:
            attributes = self._ask(
                "look at",
                key,
                lambda: obstore.get(client, key).attributes,
                max_retries=None if is_refused else 1,
            )
        except MissingError:
            return False
        except CheckpointError:
            if is_refused:
                raise
            return False
        return bool(attributes.get(_MARK) == mark)

    def _ask(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        max_retries: int | None = None,
        timeout_s: float | None = None,
        may_repeat: Callable[[CheckpointError], bool] = lambda _: True,
    ) -> T:
        """Send a request until it is answered; see ``tries.py``."""
        note_request()

        def explain(error: Exception, tries: int) -> CheckpointError:
            said = str(error)
            kind = said if isinstance(error, UnknownAnswerError) else type(error).__name__
            return typed_error(
                said,
                kind,
                operation=operation,
                name=self._name(key),
                key=key,
                endpoint=self._clients.endpoint,
                tries=tries,
            )

        answer = self._tries.run(
            request,
            explain,
            max_retries=max_retries,
            timeout_s=timeout_s,
            may_repeat=may_repeat,
        )
        self._is_bucket_known = True
        return answer

    def _wait_s(self, size_bytes: int) -> float:
        request_s = self._clients.request_s(_piece_bytes(size_bytes, is_lasting=True))
        return 2 * self._retry_timeout_s + (_UPLOADS_AT_ONCE + 2) * request_s


def _piece_bytes(size_bytes: int, *, is_lasting: bool) -> int:
    """Return how much of an object one request carries: whole blocks, sent from where they are.

    Args:
        size_bytes: The object's size.
        is_lasting: Whether nothing is copied to be sent, so that pieces under way take no memory.
    """
    at_most = size_bytes // _PIECES_AT_LEAST if is_lasting else 0
    blocks = min(at_most // BLOCK_BYTES, _PIECE_BLOCKS)
    return BLOCK_BYTES * max(1, blocks, -(-size_bytes // (BLOCK_BYTES * _MAX_PIECES)))


def _checked(meta: Any) -> Any:
    """Refuse the description of an object that no service of a bucket gives."""
    if meta["e_tag"] is None:
        raise UnknownAnswerError("an answer that is not of an object store")
    return meta


def _entry(meta: Mapping[str, Any]) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
