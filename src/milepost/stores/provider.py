"""Object stores by the names of libcloud, with secrets by the names of environment variables.

    provider = ObjectStoreProviderHparams(
        provider="s3", container="runs", key_environ="KEY", secret_environ="SECRET"
    ).initialize_object()

S3, Google's and Azure's storage are served by obstore, which knows conditional creation; the rest
by libcloud. A provider moves whole objects; as a place for runs it is a store, ``provider.store``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..errors import ExistsError, UsageError
from ..format.digest import BLOCK_BYTES
from . import posix
from .base import Entry, Store
from .uploading import Uploading

__all__ = ["ObjectStoreProvider", "ObjectStoreProviderHparams"]

_GOOGLE_ENDPOINT = "https://storage.googleapis.com"
_OBSTORE_OPTIONS = frozenset({"region", "host", "port", "secure", "token"})


@dataclass(frozen=True, kw_only=True)
class ObjectStoreProviderHparams:
    """What it takes to reach a container, without the secrets themselves.

    Args:
        provider: Name of the provider as libcloud spells it, such as ``s3``, ``google_storage``,
            ``azure_blobs``, ``minio`` or ``local``; upper or lower case.
        container: The container or bucket; for ``local`` a folder below ``key``.
        key_environ: Name of the environment variable that holds the user or the access key.
        secret_environ: Name of the one that holds the secret.
        region: Region.
        host: Another host than the provider's own.
        port: Another port.
        extra_init_kwargs: More for the client: ``secure=False``, ``token=...``. They win over the
            rest. Never put a secret here that you would not print.
    """

    provider: str
    container: str
    key_environ: str | None = None
    secret_environ: str | None = None
    region: str | None = None
    host: str | None = None
    port: int | None = None
    extra_init_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def initialize_object(self) -> ObjectStoreProvider:
        """Return the provider; look that the container is there.

        Raises:
            UsageError: An environment variable is not set, or no client can be made.
            StorageError: There is no such container.
            AccessError: It may not be looked at.
        """
        options = {
            "key": _from_environment(self.key_environ),
            "secret": _from_environment(self.secret_environ),
            "region": self.region,
            "host": self.host,
            "port": self.port,
        }
        found = {name: value for name, value in options.items() if value is not None}
        provider = ObjectStoreProvider(
            self.provider, self.container, {**found, **self.extra_init_kwargs}
        )
        provider.hparams = self
        return provider


class _Uploading(Uploading, Store, Protocol):
    """A store that takes whole objects as streams."""


class ObjectStoreProvider:
    """A container that whole objects are moved to and from.

    Args:
        provider: Name of the provider; see :class:`ObjectStoreProviderHparams`.
        container: The container.
        provider_init_kwargs: Options of the client, secrets among them.

    Attributes:
        provider_name: Name of the provider.
        container_name: Name of the container.
        store: The container as a place for runs.
        hparams: What it was made of, if that is known: another process can make it again.

    Raises:
        UsageError: No client can be made.
        StorageError: There is no such container.
        AccessError: It may not be looked at.
    """

    def __init__(
        self, provider: str, container: str, provider_init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.provider_name = provider.lower()
        self.container_name = container
        self.hparams: ObjectStoreProviderHparams | None = None
        options = dict(provider_init_kwargs or {})
        self.store: _Uploading = _open(self.provider_name, container, options)
        self.store.folders()  # a container that is not there is said now

    def __repr__(self) -> str:
        return f"ObjectStoreProvider({self.provider_name!r}, {self.container_name!r})"

    def get_uri(self, object_name: str) -> str:
        """Return the address of an object."""
        return f"{self.provider_name}://{self.container_name}/{object_name}"

    def upload_object(
        self,
        file_path: str | os.PathLike[str],
        object_name: str,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Upload a file, in the place of an object of that name if there is one.

        Args:
            file_path: The file.
            object_name: Name of the object.
            progress: Called with the bytes of each piece.

        Raises:
            StorageError: It could not be uploaded. The old object is there then, if there was one.
        """
        with Path(file_path).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            self._replace(object_name, _pieces(file, progress), size_bytes)

    def upload_object_via_stream(self, stream: bytes | Iterator[bytes], object_name: str) -> None:
        """Upload bytes, or what an iterator gives. It is held in memory if its size is not known.

        Args:
            stream: The bytes, or pieces of them.
            object_name: Name of the object.
        """
        data = bytes(stream) if isinstance(stream, bytes | bytearray) else b"".join(stream)
        self.store.put(object_name, data)

    def get_object_size(self, object_name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            MissingError: There is none of that name.
        """
        return self.store.head(object_name).size_bytes

    def download_object(
        self,
        object_name: str,
        destination_path: str | os.PathLike[str],
        *,
        overwrite_existing: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Download an object to a file, which gets its name when it is whole.

        Args:
            object_name: Name of the object.
            destination_path: The file.
            overwrite_existing: Whether it may replace one.
            progress: Called with the bytes of each piece.

        Raises:
            MissingError: There is no object of that name.
            ExistsError: There is a file, and it may not be replaced.
        """
        target = Path(destination_path)
        if target.exists() and not overwrite_existing:
            raise ExistsError(f"{target} is there already.", path=str(target))
        part = target.with_name(f".{target.name}.part{os.getpid()}")
        try:
            with part.open("wb") as file:
                for piece in self.download_object_as_stream(object_name):
                    file.write(piece)
                    if progress is not None:
                        progress(len(piece))
                file.flush()
                os.fsync(file.fileno())
            if overwrite_existing or not posix.rename_new(str(part), str(target)):
                part.replace(target)
        except FileExistsError as error:
            raise ExistsError(f"{target} is there already.", path=str(target)) from error
        finally:
            part.unlink(missing_ok=True)

    def download_object_as_stream(
        self, object_name: str, chunk_size: int = 1024 * 1024
    ) -> Iterator[bytes]:
        """Yield an object piece by piece.

        Args:
            object_name: Name of the object.
            chunk_size: Bytes of a piece.

        Raises:
            MissingError: There is none of that name.
        """
        reader = self.store.open_reader(object_name)
        try:
            for start in range(0, reader.size_bytes, BLOCK_BYTES):
                block = memoryview(bytearray(min(BLOCK_BYTES, reader.size_bytes - start)))
                reader.read_into(start, block)
                for place in range(0, len(block), chunk_size):
                    yield bytes(block[place : place + chunk_size])
        finally:
            reader.close()

    def list_objects(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the objects whose names begin with a prefix, in the order of the names."""
        folder = prefix.rpartition("/")[0]
        for entry in self.store.list(folder):
            if entry.key.startswith(prefix):
                yield entry

    def delete_object(self, object_name: str) -> None:
        """Delete an object; one that is not there is no error."""
        self.store.delete(object_name)

    def _replace(self, object_name: str, pieces: Iterator[bytes], size_bytes: int) -> None:
        if size_bytes <= BLOCK_BYTES:
            self.store.put(object_name, b"".join(pieces))
        else:
            self.store.upload(object_name, pieces, size_bytes)


def _open(provider: str, container: str, options: dict[str, Any]) -> _Uploading:
    config = _obstore_config(provider, options)
    if config is not None:
        from .cloud import CloudStore

        scheme = "az" if provider == "azure_blobs" else "s3"
        return CloudStore(f"{scheme}://{container}", config=config)
    try:
        from .libcloud import LibcloudStore, make_driver
    except ImportError as error:
        raise UsageError(
            f"The provider {provider!r} needs apache-libcloud.",
            hint="Install it with: pip install 'milepost[libcloud]'",
        ) from error
    return LibcloudStore(provider, container, make=lambda: make_driver(provider, options))


def _obstore_config(provider: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of obstore's client, or ``None`` if libcloud is to serve the provider."""
    is_s3 = provider == "s3" or provider.startswith("s3_")
    if not (is_s3 or provider in ("google_storage", "azure_blobs", "minio")):
        return None
    if set(options) - _OBSTORE_OPTIONS - {"key", "secret"}:
        return None  # options of the libcloud driver
    endpoint = _endpoint(options)
    if provider == "azure_blobs":
        return _known(
            account_name=options.get("key"), account_key=options.get("secret"), endpoint=endpoint
        )
    if provider == "google_storage":
        # Keys of this kind are for its S3 side.
        endpoint = endpoint or _GOOGLE_ENDPOINT
    region = options.get("region") or _region(provider)
    return _known(
        access_key_id=options.get("key"),
        secret_access_key=options.get("secret"),
        session_token=options.get("token"),
        region=region or ("auto" if endpoint else None),
        endpoint=endpoint,
    )


def _known(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _region(provider: str) -> str | None:
    """Return the region that the name of a provider stands for, such as ``s3_eu_west2``."""
    named = {
        "s3_us_west": "us-west-1",
        "s3_us_west_oregon": "us-west-2",
        "s3_us_east2": "us-east-2",
        "s3_us_gov_west": "us-gov-west-1",
        "s3_eu_west": "eu-west-1",
        "s3_eu_west2": "eu-west-2",
        "s3_eu_west3": "eu-west-3",
        "s3_eu_central": "eu-central-1",
        "s3_eu_north1": "eu-north-1",
        "s3_ap_southeast": "ap-southeast-1",
        "s3_ap_southeast2": "ap-southeast-2",
        "s3_ap_northeast": "ap-northeast-1",
        "s3_ap_northeast1": "ap-northeast-1",
        "s3_ap_northeast2": "ap-northeast-2",
        "s3_ap_south": "ap-south-1",
        "s3_ca_central": "ca-central-1",
        "s3_cn_north": "cn-north-1",
        "s3_cn_northwest": "cn-northwest-1",
        "s3_sa_east": "sa-east-1",
    }
    return named.get(provider)


def _endpoint(options: Mapping[str, Any]) -> str | None:
    host, port = options.get("host"), options.get("port")
    if host is None:
        return None
    if "://" in str(host):
        return f"{host}:{port}" if port else str(host)
    scheme = "https" if options.get("secure", True) else "http"
    return f"{scheme}://{host}:{port}" if port else f"{scheme}://{host}"


def _from_environment(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return os.environ[name]
    except KeyError:
        raise UsageError(
            f"The environment variable {name} is not set.",
            hint="It has to hold a credential of the object store.",
            name=name,
        ) from None


def _pieces(file: BinaryIO, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    while piece := file.read(BLOCK_BYTES):
        yield piece
        if progress is not None:
            progress(len(piece))
