"""A store in a bucket of S3, GCS or Azure, or of anything that speaks one of their protocols.

What makes it durable is the service: an object is there, whole and durable, when its upload has
been answered. What makes ``put_new`` exclusive is a condition on the upload, "only if there is
none". An answer may get lost on the way, and the try after it is refused because of our own object:
so each object carries a random mark, and a refusal is believed only if the mark is another's.

Records are small and uploaded at once. Parts are streamed in several pieces while they are written,
and are visible when the last piece has been answered; what was begun and not ended is dropped.

The only module that imports obstore.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import obstore
from obstore.store import from_url

from ..errors import (
    CheckpointError,
    DamagedError,
    DeadlineError,
    ExistsError,
    FormatError,
    MissingError,
    StorageError,
    UsageError,
)
from ..format.digest import BLOCK_BYTES
from ..format.layout import check_key
from .base import Entry, Names, Traits
from .ranges import RangeReader
from .refusals import typed_error
from .uploading import FeedWriter

__all__ = ["CloudStore"]

_log = logging.getLogger("milepost")

_MARK = "mpwrite"
_SLOWEST_BYTES_S = 250_000
_CONNECT_S = 10
_MAX_PIECES = 9_000
_RETRIES = 6
_RETRY_TIMEOUT_S = 120.0
_UPLOADS_AT_ONCE = 8
"""Pieces of one object on their way. One connection to S3 takes about 100 MB/s."""


@final
class CloudStore:
    """Keeps each key as an object below a prefix of a bucket.

    Args:
        url: Such as ``s3://bucket/prefix``, ``gs://...``, ``az://...`` or ``abfss://...``.
        config: Options of the client by the names that obstore gives them, such as ``endpoint``.
            What is missing comes from the environment, as for the tools of the service.
        retry_timeout_s: How long one request is tried again.
        max_retries: How often.

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
    ) -> None:
        self.url = url.rstrip("/")
        self.traits = Traits(
            is_local=False, exclusive_create=True, hard_links=False, symlinks=False
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._was_probed = False
        self._wait_s = retry_timeout_s + 60.0
        options = {**_defaults(url), **(config or {})}
        endpoint = str(options.get("endpoint") or _endpoint_of_environment())
        if _may_leave_unsigned(self.url, endpoint, options):
            options["unsigned_payload"] = True
        try:
            self._store = from_url(
                self.url,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": f"{_CONNECT_S}s",
                    "timeout": f"{_CONNECT_S + BLOCK_BYTES // _SLOWEST_BYTES_S}s",
                },
                retry_config={
                    "max_retries": max_retries,
                    "retry_timeout": timedelta(seconds=retry_timeout_s),
                },
                **options,
            )
        except Exception as error:  # noqa: BLE001 - of a library: whatever it is, there is no client
            raise UsageError(
                f"No client can be made for {self.url}: {type(error).__name__}.",
                hint="Look at the address, and at the options that were given with it.",
                path=self.url,
            ) from None  # its text may hold what it was given

    def __repr__(self) -> str:
        return f"CloudStore({self.url!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError(
            f"{self!r} cannot be pickled: it holds credentials.",
            hint="Give the address to the other process, and let it open the store itself.",
        )

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data`` or raise ``ExistsError``."""
        self._check(key)
        self._probe_once()
        if self.traits.exclusive_create:
            self._create(key, data)
        else:
            with (
                self._lock
            ):  # among the threads that share this object it is exclusive all the same
                self._refuse_existing(key)
                self.put(key, data)

    def _create(self, key: str, data: bytes) -> None:
        mark = secrets.token_hex(16)
        try:
            with self._typed("create", key):
                obstore.put(
                    self._store,
                    key,
                    bytes(data),
                    mode="create",
                    attributes={_MARK: mark},
                    use_multipart=False,
                )
        except (ExistsError, StorageError, DeadlineError) as error:
            # It may be ours: the answer to a first try got lost.
            if not self._has_mark(key, mark):
                raise error from error.__cause__

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key``."""
        self._check(key)
        with self._typed("put", key):
            obstore.put(self._store, key, bytes(data), use_multipart=False)

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""
        self._check(key)
        with self._typed("get", key):
            found = obstore.get(self._store, key)
            size_bytes = found.meta["size"]
            if size_bytes <= max_bytes:
                data = bytes(found.bytes())
        if size_bytes > max_bytes:
            raise FormatError(
                f"{key} holds {size_bytes:,} bytes; at most {max_bytes:,} are read.", path=key
            )
        if len(data) != size_bytes:
            raise DamagedError(
                f"{self._name(key)} came with {len(data):,} of {size_bytes:,} bytes.", path=key
            )
        return data

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        self._check(key)
        with self._typed("look at", key):
            return _entry(obstore.head(self._store, key))

    def list(self, folder: str = "") -> Iterator[Entry]:
        """Yield every key below a folder in the order of the keys."""
        prefix = f"{self._check(folder)}/" if folder else None
        with self._typed("list", folder):
            found = [
                _entry(meta)
                for page in obstore.list(self._store, prefix=prefix, chunk_size=1000)
                for meta in page
            ]
        yield from sorted(found, key=lambda entry: entry.key)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        prefix = f"{self._check(folder)}/" if folder else None
        with self._typed("list", folder):
            found = obstore.list_with_delimiter(self._store, prefix=prefix)["common_prefixes"]
        return sorted(one.rstrip("/").rpartition("/")[2] for one in found)

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._check(key)
        try:
            with self._typed("delete", key):
                obstore.delete(self._store, key)
        except MissingError:
            return  # some services say so

    def rename(self, key: str, new_key: str) -> None:
        """Move ``key`` to ``new_key``, which must not exist, in two steps. For records."""
        data = self.get(key)
        self.put_new(new_key, data)
        self.delete(key)

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key: a copy that the service makes."""
        self._check(key)
        self._check(new_key)
        self._refuse_existing(new_key)
        with self._typed("copy", key):
            obstore.copy(self._store, key, new_key)

    def point(self, key: str, target: str) -> None:
        """Make ``key`` a text with the target's name."""
        self.put(key, f"{target}\n".encode())

    def create_writer(self, key: str, size_bytes: int) -> FeedWriter:
        """Begin to write a new key of a known size."""
        self._check(key)
        self._refuse_existing(key)
        return FeedWriter(self, key, size_bytes, timeout_s=self._wait_s)

    def open_reader(self, key: str) -> RangeReader:
        """Open a key for reading."""
        return RangeReader(self, key, self.head(key).size_bytes)

    def sync_folder(self, folder: str) -> None:
        """Do nothing: what was answered is durable."""

    def local_path(self, key: str) -> str | None:  # noqa: ARG002 - the contract's name
        """Return ``None``: there are no files."""
        return None

    def _probe_once(self) -> None:
        """Find out whether the place refuses to create what is there.

        Two objects are created under one random name. A place that accepts the second is used with
        a look before each create instead, which is safe with a single writer only.
        """
        with self._lock:
            if self._was_probed:
                return
            key = f"probe-{secrets.token_hex(8)}"
            self._create(key, b"first")
            try:
                self._create(key, b"second")
            except ExistsError:
                self._was_probed = True
            finally:
                self.delete(key)
            if self._was_probed:
                return
            self._was_probed = True
            self.traits = replace(self.traits, exclusive_create=False)
            _log.warning(
                "%s does not refuse to create what is there already: it is safe for one writer "
                "only. Never let two processes save to one run there at the same time.",
                self.url,
            )

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Upload an object in several pieces; one of that name is replaced."""
        self._check(key)
        # Whole blocks, so that the client sends each from where it is.
        piece_bytes = BLOCK_BYTES * max(1, -(-size_bytes // (BLOCK_BYTES * _MAX_PIECES)))
        with self._typed("upload", key):
            obstore.put(
                self._store,
                key,
                iter(pieces),
                use_multipart=True,
                chunk_size=piece_bytes,
                max_concurrency=_UPLOADS_AT_ONCE,
            )

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes of a key. Used by the reader."""
        with self._typed("read", key):
            return memoryview(obstore.get_range(self._store, key, start=start, length=length))

    def _check(self, key: str) -> str:
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self!r} cannot be used in a forked child of the process that opened it.",
                hint="Start the process with spawn, and open the store there.",
            )
        return check_key(key, where=self.url)

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _refuse_existing(self, key: str) -> None:
        try:
            self.head(key)
        except MissingError:
            return
        raise ExistsError(f"There is already a {self._name(key)}.", path=key)

    def _has_mark(self, key: str, mark: str) -> bool:
        try:
            with self._typed("look at", key):
                return bool(obstore.get(self._store, key).attributes.get(_MARK) == mark)
        except CheckpointError:
            return False

    @contextmanager
    def _typed(self, operation: str, key: str) -> Iterator[None]:
        """Turn errors of the client into those of this library, without what they may give away."""
        try:
            yield
        except CheckpointError:
            raise
        except (obstore.exceptions.BaseError, OSError) as error:
            raise typed_error(
                str(error), type(error).__name__, operation=operation, name=self._name(key), key=key
            ) from None


def _defaults(url: str) -> dict[str, Any]:
    """Return what the client is told unless something else is asked for.

    Objects are deleted one by one: not every service that speaks S3 deletes several by one request,
    and some do it and answer what the client does not take.
    """
    return {"disable_bulk_delete": True} if url.startswith(("s3://", "s3a://")) else {}


def _entry(meta: Mapping[str, Any]) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _may_leave_unsigned(url: str, endpoint: str, options: Mapping[str, Any]) -> bool:
    """Return whether bodies need no checksum of their own, which costs half of an upload's work.

    TLS has one already, so that the tools of the service leave it out there as well.
    """
    is_said = "AWS_UNSIGNED_PAYLOAD" in os.environ or any(
        name.lower().removeprefix("aws_") == "unsigned_payload" for name in options
    )
    is_s3 = url.startswith(("s3://", "s3a://"))
    return is_s3 and not endpoint.startswith("http://") and not is_said


def _endpoint_of_environment() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
