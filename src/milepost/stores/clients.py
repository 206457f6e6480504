"""Clients of obstore for one bucket, by what a request carries and which way.

A client has one time limit for all of its requests. So there is one for each size of requests, and
each request gets the time that its bytes take on the slowest connection. A client that reads also
notices when nothing comes any more; while bytes are sent nothing is expected to come, and the time
of the request is the limit. While the service copies an object nothing is sent either way, but it
is done where the bytes are: a request for that has the time that a service takes at most.

Single requests are tried again by whoever sends them; only a client for uploads does so itself,
since it alone holds the pieces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, final
from urllib.parse import urlsplit

from obstore.store import from_url

from ..errors import UsageError
from ..format.digest import BLOCK_BYTES
from .forked import hold_in_children, refuse_without_threads

__all__ = ["Clients"]

Kind = Literal["read", "write", "upload", "copy"]

_CONNECT_S = 10
_SIZES = (1024 * 1024, *(n * BLOCK_BYTES for n in (1, 2, 8, 64, 512)))
_COPY_SILENT, _COPY_FASTER = 3, 500
"""Of the times of other requests: 60 s, and as long as the bytes take at 50 MB/s."""

_PREFIX = re.compile(r"^(aws|azure|google)_")
_OF_CONNECTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options that obstore takes elsewhere; given with those of a bucket they make it panic."""

_AZURE = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": _AZURE,
    "azure": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}


@final
class Clients:
    """Makes clients as they are needed, and keeps them.

    Args:
        url: The address of the prefix.
        config: Options by the names that obstore gives them.
        max_retries: How often the client tries each request of an upload again.
        retry_timeout_s: For how long.
        silent_timeout_s: How long a connection may give nothing before it counts as broken.
        slowest_bytes_s: What each connection carries at least.

    Attributes:
        is_s3: Whether it is a place that speaks S3.
        is_azure: Whether it is a place of Azure.
        has_own_credentials: Whether a program gives the credentials, anew when they expire.
        endpoint: The address of the service, or empty if the client knows it by itself.
        are_uploads_checked: Whether the service compares what comes with a checksum of what was
            sent: S3 does, by the signature of the request.

    Raises:
        UsageError: The client cannot be made of this.
    """

    def __init__(
        self,
        url: str,
        config: Mapping[str, Any],
        *,
        max_retries: int,
        retry_timeout_s: float,
        silent_timeout_s: float,
        slowest_bytes_s: int,
    ) -> None:
        _refuse_odd(url)
        _refuse_of_connections(url, config)
        scheme = url.partition("://")[0].lower().replace("s3a", "s3")
        is_s3 = self.is_s3 = scheme == "s3"
        self.is_azure = _ENDPOINTS.get(scheme) is _AZURE
        self.has_own_credentials = config.get("credential_provider") is not None
        given = config.get("endpoint") or config.get("base_url")
        self.endpoint = str(given or _from_environment(*_ENDPOINTS.get(scheme, ())))
        options = {**(_defaults_of_s3(config, self.endpoint) if is_s3 else {}), **config}
        self.are_uploads_checked = is_s3 and _has_checksum(options)
        self._silent_timeout_s = silent_timeout_s
        self._slowest_bytes_s = slowest_bytes_s
        self._clients: dict[tuple[str, int], Any] = {}

        refuse_without_threads(url)

        # A function, not a field: what is printed of this object must not hold credentials.
        def make(kind: Kind, size_bytes: int) -> Any:
            client: dict[str, Any] = {
                "allow_http": self.endpoint.startswith("http://"),
                "connect_timeout": f"{_CONNECT_S}s",
                "timeout": _text(self.request_s(size_bytes, kind=kind)),
            }
            if kind == "read":
                client["read_timeout"] = _text(silent_timeout_s)
            retries: dict[str, Any] = {
                "max_retries": max_retries if kind == "upload" else 0,
                "retry_timeout": timedelta(seconds=retry_timeout_s),
            }
            any_from_url: Any = from_url
            made = any_from_url(url, client_options=client, retry_config=retries, **options)
            hold_in_children(made)
            return made

        self._make = make
        self._s3_options: Callable[[], Mapping[str, Any]] = lambda: options
        try:
            self.get("read")
        except BaseException as error:
            # A panic of the library is none of Exception, and its type cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UsageError(
                f"No client can be made for {url}: {type(error).__name__}.",
                hint="Look at the address, and at the options that were given with it.",
                path=url,
            ) from None  # its text may hold what it was given

    def get(self, kind: Kind, size_bytes: int = 0) -> Any:
        """Return the client for requests that carry so many bytes at most, or copy them."""
        largest = size_bytes if kind == "copy" else _SIZES[-1]
        which = kind, next((size for size in _SIZES if size_bytes <= size), largest)
        client = self._clients.get(which)
        return client or self._clients.setdefault(which, self._make(*which))

    def s3_option(self, *names: str) -> str:
        """Return an option of S3 that this client goes by, the first of some names, or nothing."""
        return next(filter(None, (_option(self._s3_options(), name) for name in names)), "")

    def request_s(self, size_bytes: int, *, kind: Kind = "write") -> float:
        """Return the time that a request with so many bytes has."""
        if kind == "copy":
            copied_bytes_s = _COPY_FASTER * self._slowest_bytes_s
            return _COPY_SILENT * self._silent_timeout_s + size_bytes / copied_bytes_s
        return self._silent_timeout_s + size_bytes / self._slowest_bytes_s


def _refuse_odd(url: str) -> None:
    """Refuse an address that the client would read as that of another place."""
    parts = urlsplit(url)
    names = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    is_odd = parts.query or parts.fragment or parts.path.startswith("//")
    if is_odd or any(name in ("", ".", "..") for name in names):
        plain = "/".join(name for name in names if name not in ("", ".", ".."))
        raise UsageError(
            f"{url!r} is not the address of a folder in a bucket.",
            hint=f"Write {parts.scheme}://{parts.netloc}/{plain}".rstrip("/") + ".",
            path=url,
        )


def _refuse_of_connections(url: str, config: Mapping[str, Any]) -> None:
    for name in config:
        if _PREFIX.sub("", str(name).lower()) in _OF_CONNECTIONS:
            raise UsageError(
                f"{name!r} is no option of a bucket, but of the connections to it.",
                hint="Leave it out: http is allowed where the endpoint begins with http://, and "
                "times follow from silent_timeout_s and slowest_bytes_s.",
                path=url,
                option=name,
            )


def _defaults_of_s3(config: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """Return what the client is told unless something else is asked for.

    Objects are deleted one by one: not every service that speaks S3 deletes several by one request,
    and some do it and answer what the client does not take.

    A body needs no SHA-256 in its signature where TLS protects it, as the tools of the service
    leave it out there too: it costs half of an upload's work. S3 itself is given another checksum
    to compare, which costs next to nothing; not all that speak its protocol know that one.
    """
    defaults: dict[str, Any] = {"disable_bulk_delete": True}
    if not endpoint.startswith("http://") and not _option(config, "unsigned_payload"):
        defaults["unsigned_payload"] = True
        if not endpoint and not _option(config, "checksum_algorithm"):
            defaults["checksum_algorithm"] = "CRC64NVME"
    return defaults


def _has_checksum(options: Mapping[str, Any]) -> bool:
    """Return whether requests say what their bodies must be."""

    def is_on(name: str) -> bool:
        return _option(options, name).lower() not in ("", "false")

    is_signed = not (is_on("unsigned_payload") or is_on("skip_signature"))
    return is_signed or is_on("checksum_algorithm")


def _option(options: Mapping[str, Any], name: str) -> str:
    """Return an option that was given, or is in the environment, or nothing."""
    names = (name, f"aws_{name}")
    given = next((str(v) for k, v in options.items() if k.lower() in names), "")
    return given or _from_environment(f"AWS_{name.upper()}")


def _text(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _from_environment(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
