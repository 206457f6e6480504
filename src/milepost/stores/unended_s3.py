"""Uploads to S3 that were begun and have not ended, seen and ended through boto3.

A process that is killed while it sends an object in several parts leaves them behind. No listing of
objects shows them, they are paid for like objects, and the client that moves the bytes cannot ask
for them. So another one does, where it is installed; whose they are and whether nobody goes on with
them is decided by ``runs/cut_off.py``.

It gets the address and the credentials of the store's own client, and finds the role of a machine
as that one does: files of profiles are not read. The only module that imports boto3.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, final

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from .base import BegunUpload, BegunUploads
from .refusals import typed_error

__all__ = ["Access", "S3Uploads"]

_CONNECT_S = 10
_SILENT_S = 20
_TRIES = 3
_NO_FILES: dict[str, Any] = {
    "profile": (None, [], None, None),
    "config_file": (None, [], os.devnull, None),
    "credentials_file": (None, [], os.devnull, None),
}
"""As variables of a session: name in a file, in the environment, default, conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a service that speaks S3 is reached.

    Attributes:
        endpoint: Its address, or empty for Amazon's own.
        region: The region.
        key_id: Number of the key; empty to look for a role.
        secret: The secret that belongs to it.
        token: Of a temporary key, else empty.
        is_unsigned: Whether requests go without credentials.
        is_bucket_in_host: Whether the bucket is named in the host and not in the path.
    """

    endpoint: str
    region: str
    key_id: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    is_unsigned: bool = False
    is_bucket_in_host: bool = False


@final
class S3Uploads:
    """Uploads to one bucket that have not ended.

    Args:
        bucket: The bucket.
        prefix: The folder in it that the store stands in, without a slash at the end; or empty.
        access: How it is reached.
        url: The address of the store, for messages.

    Raises:
        Exception: Of boto3, whatever it is: no client can be made of this.
    """

    def __init__(self, bucket: str, prefix: str, access: Access, *, url: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = access.endpoint
        self._url = url
        self._client = _client(bucket, access)

    def find(self, start: str = "") -> BegunUploads:
        """Return the uploads to keys that begin with ``start``.

        Raises:
            AccessError: They may not be listed.
            StorageError: The service does not list them, or cannot be reached.
        """
        found: list[BegunUpload] = []
        now_s: float | None = None
        with self._typed("list the uploads of", start):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + start
            )
            for page in pages:
                now_s = now_s or _clock(page)
                for one in page.get("Uploads", ()):
                    if one["Key"].startswith(self._prefix + start):
                        key = one["Key"][len(self._prefix) :]
                        found.append(
                            BegunUpload(key, one["UploadId"], one["Initiated"].timestamp())
                        )
        # MinIO shows uploads only to whoever asks for their very key.
        is_whole = not self._endpoint or bool(found)
        return BegunUploads(tuple(found), now_s=now_s, is_whole=is_whole)

    def written_s(self, upload: BegunUpload) -> float:
        """Return when the last part of an upload came, or when it was begun, by its own clock.

        Of an upload that has ended meanwhile nobody can tell: infinity, as if it went on.
        """
        latest_s = upload.begun_s
        with self._typed("look at the upload of", upload.key):
            pages = self._client.get_paginator("list_parts").paginate(**self._naming(upload))
            try:
                for page in pages:
                    for part in page.get("Parts", ()):
                        latest_s = max(latest_s, part["LastModified"].timestamp())
            except ClientError as error:
                if not _has_ended(error):
                    raise
                return math.inf
        return latest_s

    def end(self, upload: BegunUpload) -> None:
        """Drop an upload with all of its parts; one that has ended is no error."""
        with self._typed("end the upload of", upload.key):
            try:
                self._client.abort_multipart_upload(**self._naming(upload))
            except ClientError as error:
                if not _has_ended(error):
                    raise

    def _naming(self, upload: BegunUpload) -> dict[str, str]:
        key = self._prefix + upload.key
        return {"Bucket": self._bucket, "Key": key, "UploadId": upload.upload_id}

    @contextmanager
    def _typed(self, operation: str, key: str) -> Iterator[None]:
        """Turn errors of boto3 into those of this library, without what they may give away."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - not all that boto3 raises is of its own kinds
            raise typed_error(
                _said(error),
                type(error).__name__,
                operation=operation,
                name=f"{self._url}/{key}".rstrip("/"),
                key=key,
                endpoint=self._endpoint,
            ) from None


def _client(bucket: str, access: Access) -> Any:
    endpoint = access.endpoint
    if access.is_bucket_in_host:  # it is put there once more
        endpoint = endpoint.replace(f"://{bucket}.", "://", 1)
    style = "virtual" if access.is_bucket_in_host else "path" if endpoint else "auto"
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_SILENT_S,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        s3={"addressing_style": style},
        **({"signature_version": UNSIGNED} if access.is_unsigned else {}),
    )
    session = boto3.session.Session(
        botocore_session=botocore.session.Session(session_vars=_NO_FILES)
    )
    return session.client(
        "s3",
        region_name=access.region,
        endpoint_url=endpoint or None,
        aws_access_key_id=access.key_id or None,
        aws_secret_access_key=access.secret or None,
        aws_session_token=access.token or None,
        config=config,
    )


def _has_ended(error: ClientError) -> bool:
    return bool(error.response.get("Error", {}).get("Code") == "NoSuchUpload")


def _clock(page: Mapping[str, Any]) -> float | None:
    """Return the time of an answer by the clock of the service."""
    said = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(said).timestamp()
    except (TypeError, ValueError):
        return None


def _said(error: Exception) -> str:
    """Return status and code of an answer, in the words of the store's own client."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code", "")
    return f"status code: {status:03d} <Code>{code}</Code>"
