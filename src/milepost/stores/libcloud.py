"""A store in a container of anything that apache-libcloud knows.

libcloud has no upload on a condition, so one writer only may use a run there; it is said once. An
object is visible when its upload has been answered. Its drivers hold a connection and are not safe
to share: each thread has one of its own.

Requests are tried again as by the other stores, see ``tries.py``, where it can be told that this
may help: the connection broke, or the service has answered with a status that says so. Most drivers
put that into a text only; the last answer of the connection has it as a number.

The only module that imports libcloud.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.client import HTTPException
from typing import Any, TypeVar, final

import requests
from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.types import InvalidCredsError, LibcloudError, MalformedResponseError
from libcloud.storage.providers import get_driver
from libcloud.storage.types import (
    ContainerDoesNotExistError,
    ObjectDoesNotExistError,
    ObjectError,
    ObjectHashMismatchError,
)

from ..errors import (
    AccessError,
    CheckpointError,
    DamagedError,
    FormatError,
    MissingError,
    StorageError,
    UsageError,
)
from ..format.layout import check_key
from .base import Entries, Entry, Names
from .bucket import BucketStore
from .feed import BlockFeed
from .pace import pace_of
from .refusals import UnknownAnswerError, whole_range
from .tries import Tries

__all__ = ["LibcloudStore", "make_driver"]

T = TypeVar("T")

_WAIT_S = 180.0
_RETRIES = 12
_RETRY_TIMEOUT_S = 120.0
_DUMB_TRIES = 6
"""Of what fails without a status: a driver that ends an upload has another answer by then."""

_ERRORS = (
    LibcloudError,
    BaseHTTPError,
    requests.RequestException,
    HTTPException,
    OSError,
    UnknownAnswerError,
)
_BROKEN = (requests.RequestException, HTTPException, ConnectionError, TimeoutError)
"""Of these a later try may come through, unless what was asked makes no sense, which is a
``ValueError`` too."""

_CHUNK_BYTES = 1024 * 1024


def make_driver(provider: str, options: Mapping[str, Any]) -> Any:
    """Return a driver of libcloud.

    Args:
        provider: Its name, as libcloud spells it.
        options: What the driver takes: ``key``, ``secret``, ``region``, ``host``, ``port``, ...

    Raises:
        UsageError: libcloud has no such provider, or it does not take these options.
    """
    try:
        return get_driver(provider.lower())(**options)
    except AttributeError as error:
        raise UsageError(
            f"libcloud knows no storage provider {provider!r}.",
            hint="See the providers of libcloud.storage.types.Provider.",
        ) from error
    except (TypeError, ValueError, ImportError) as error:
        names = ", ".join(sorted(options))
        raise UsageError(
            f"libcloud makes no client for {provider!r} of the options {names}: "
            f"{type(error).__name__}.",
            hint="Look at what the driver of this provider takes, and at its dependencies.",
        ) from None  # its text may hold what it was given


@final
class LibcloudStore(BucketStore):
    """Keeps each key as an object below a prefix of a container.

    Args:
        name: Name of the provider.
        container: The container, which must exist.
        prefix: A folder in it, or empty.
        make: Returns a new driver; called once in each thread.
        retry_timeout_s: How long one request is tried again.
        max_retries: How often.

    Raises:
        StorageError: There is no such container.
        AccessError: It may not be looked at.
    """

    def __init__(
        self,
        name: str,
        container: str,
        *,
        prefix: str = "",
        make: Callable[[], Any],
        retry_timeout_s: float = _RETRY_TIMEOUT_S,
        max_retries: int = _RETRIES,
    ) -> None:
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        url = f"libcloud://{name}/{container}/{self._prefix}".rstrip("/")
        super().__init__(url, exclusive_create=False)
        self._container_name = container
        self._is_folder = name == "local"
        self._make = make
        self._local = threading.local()
        self._tries = Tries(
            pace_of(f"libcloud {name}/{container}"),
            max_retries=max_retries,
            timeout_s=retry_timeout_s,
            errors=_ERRORS,
        )
        self._ask("look at", "", self._container)

    def put_new(self, key: str, data: bytes) -> None:
        """Create ``key`` with ``data``, or raise ``ExistsError``. Safe for one writer only."""
        self._warn_of_one_writer()
        self._create_after_look(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Create or replace ``key``."""
        path, body = self._path(key), bytes(data)

        def put() -> None:
            driver, container = self._container()
            driver.upload_object_via_stream(iter([body]), container, path)

        self._ask("put", key, put)

    def get(self, key: str, *, max_bytes: int = 256 * 1024 * 1024) -> bytes:
        """Return the bytes of ``key``."""

        def get() -> bytes:
            driver, found = self._object(key)
            if found.size > max_bytes:
                raise FormatError(
                    f"{key} holds {found.size:,} bytes; at most {max_bytes:,} are read.", path=key
                )
            data = b"".join(driver.download_object_as_stream(found, _CHUNK_BYTES))
            if len(data) != found.size:
                raise DamagedError(
                    f"{self._name(key)} came with {len(data):,} of {found.size:,} bytes.", path=key
                )
            return data

        return self._ask("get", key, get)

    def head(self, key: str) -> Entry:
        """Return the entry of ``key`` or raise ``MissingError``."""
        return self._ask("look at", key, lambda: self._entry(self._object(key)[1]))

    def _list_all(self, folder: str) -> Entries:
        """Return every object below a folder, whatever its name."""
        prefix = f"{self._path(folder)}/" if folder else self._prefix

        def look() -> Entries:
            driver, container = self._container()
            return [
                self._entry(one)
                for one in driver.iterate_container_objects(
                    # Its driver for folders warns that it cannot filter; that is done here anyway.
                    container,
                    prefix=None if self._is_folder else prefix or None,
                )
                if one.name.startswith(prefix)
            ]

        return self._ask("list", folder, look)

    def folders(self, folder: str = "") -> Names:
        """Return the names directly below a folder that have keys below them, sorted."""
        start = len(folder) + 1 if folder else 0
        below = (entry.key[start:].partition("/") for entry in self.list(folder))
        return sorted({name for name, slash, _ in below if slash})

    def delete(self, key: str) -> None:
        """Remove ``key``."""

        def delete() -> None:
            driver, found = self._object(key)
            driver.delete_object(found)

        try:
            self._ask("delete", key, delete)
        except MissingError:
            return

    def link(self, key: str, new_key: str) -> None:
        """Give the bytes of ``key`` a second key: they are read and written again."""
        self._refuse_existing(new_key)
        path = self._path(new_key)

        def copy() -> None:
            driver, found = self._object(key)
            stream = driver.download_object_as_stream(found, _CHUNK_BYTES)
            driver.upload_object_via_stream(iter(stream), found.container, path)

        self._ask("copy", key, copy)

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Upload an object as a stream; one of that name is replaced."""
        del size_bytes
        path = self._path(key)
        num_taken = 0

        def taken() -> Iterator[bytes]:
            nonlocal num_taken
            for piece in pieces:
                num_taken += 1
                yield bytes(piece)

        def upload() -> None:
            nonlocal num_taken
            num_taken = 0
            driver, container = self._container()
            driver.upload_object_via_stream(taken(), container, path)

        def may_repeat() -> bool:
            return num_taken == 0 or (isinstance(pieces, BlockFeed) and pieces.begin_again())

        self._ask("upload", key, upload, may_repeat=may_repeat)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return a range of bytes that a key has, all of them. Used by the reader."""

        def read() -> memoryview:
            driver, found = self._object(key)
            try:
                stream = driver.download_object_range_as_stream(found, start, start + length)
                part = memoryview(b"".join(stream))
            except NotImplementedError:
                part = _cut(driver.download_object_as_stream(found, _CHUNK_BYTES), start, length)
            return whole_range(part, length)

        return self._ask("read", key, read)

    def _container(self) -> tuple[Any, Any]:
        """Return the driver of this thread and the container."""
        self._refuse_fork()
        found: tuple[Any, Any] | None = getattr(self._local, "container", None)
        if found is None:
            driver = self._make()
            found = self._local.container = (driver, driver.get_container(self._container_name))
        return found

    def _object(self, key: str) -> tuple[Any, Any]:
        path = self._path(key)
        driver, _ = self._container()
        try:
            return driver, driver.get_object(self._container_name, path)
        except ObjectError as error:
            if self._is_folder and type(error) is ObjectError:  # a folder, and so no object
                raise MissingError(f"There is no {self._name(key)}.", path=key) from None
            raise

    def _entry(self, found: Any) -> Entry:
        modified = found.extra.get("last_modified") or found.extra.get("modify_time") or 0
        return Entry(found.name[len(self._prefix) :], int(found.size), _seconds(modified))

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key, where=self.url)

    def _wait_s(self, size_bytes: int) -> float:  # noqa: ARG002 - the same for all
        return _WAIT_S

    def _ask(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> T:
        """Send a request until it is answered; see ``tries.py``."""
        may_pass = False

        def explain(error: Exception, tries: int) -> CheckpointError:
            nonlocal may_pass
            status = self._status_of(error)
            is_broken = isinstance(error, _BROKEN) and not isinstance(error, ValueError)
            is_odd = isinstance(error, MalformedResponseError | UnknownAnswerError)
            is_dumb = type(error) is LibcloudError and status is None and tries < _DUMB_TRIES
            may_pass = is_broken or is_odd or is_dumb or _passes(status)
            return self._typed(error, operation, key, status=status, tries=tries)

        return self._tries.run(request, explain, may_repeat=lambda _: may_pass and may_repeat())

    def _status_of(self, error: Exception) -> int | None:
        """Return the status of the answer that an error is about, if there was one."""
        for name in ("code", "http_code"):
            status = getattr(error, name, None)
            if isinstance(status, int):
                return status
        if type(error) is not LibcloudError:
            return None
        driver, _ = getattr(self._local, "container", (None, None))
        answer = driver
        for name in ("connection", "connection", "response"):
            answer = getattr(answer, name, None)
        status = getattr(answer, "status_code", None)
        return status if isinstance(status, int) and status >= 300 else None

    def _typed(
        self, error: Exception, operation: str, key: str, *, status: int | None, tries: int
    ) -> CheckpointError:
        """Return an error of this library for one of libcloud, without what it may give away."""
        name = self._name(key)
        facts: dict[str, Any] = {
            "operation": operation,
            "path": key,
            "status": status,
            "code": None,
            "tries": tries,
        }
        if isinstance(error, ObjectDoesNotExistError):
            return MissingError(f"There is no {name}.", path=key)
        if isinstance(error, ContainerDoesNotExistError):
            return StorageError(
                f"Could not {operation} {name}: there is no container {self._container_name}.",
                hint="Create it, or look at the address.",
                **facts,
            )
        if isinstance(error, ObjectHashMismatchError):
            return DamagedError(f"{name} came to harm on the way.", path=key)
        if isinstance(error, InvalidCredsError):
            return AccessError(
                f"Could not {operation} {name}: the credentials were refused.",
                hint="Look at the credentials of this process.",
                **facts,
            )
        is_own = isinstance(error, UnknownAnswerError)
        said = f"status {status}" if status else str(error) if is_own else type(error).__name__
        what = f"Could not {operation} {name}: {said}" + (
            f", after {tries} tries." if tries > 1 else "."
        )
        return (AccessError if status in (401, 403) else StorageError)(what, **facts)


def _passes(status: int | None) -> bool:
    return status is not None and (status >= 500 or status in (408, 429))


def _cut(stream: Any, start: int, length: int) -> memoryview:
    """Return a range of what a stream gives, for drivers that cannot begin in the middle."""
    found, place = bytearray(), 0
    for piece in stream:
        low, high = max(start - place, 0), min(start + length - place, len(piece))
        if low < high:
            found += piece[low:high]
        place += len(piece)
        if place >= start + length:
            break
    return memoryview(found)


def _seconds(modified: Any) -> float:
    """Return a time of change in seconds since 1970; drivers give numbers or texts of two kinds."""
    if isinstance(modified, int | float):
        return float(modified)
    from datetime import datetime
    from email.utils import parsedate_to_datetime

    text = str(modified)
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            return parse(text.replace("Z", "+00:00")).timestamp()
        except (TypeError, ValueError):
            continue
    return 0.0
