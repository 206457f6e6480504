"""Which services show uploads that have not ended, and what becomes of them elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import threading
from typing import TYPE_CHECKING, final
from urllib.parse import urlsplit

from ..errors import UsageError
from .clients import Clients

if TYPE_CHECKING:
    from .unended_s3 import S3Uploads

__all__ = ["Unended"]

_log = logging.getLogger("milepost")
_RULE = "a rule of the bucket should remove them after some days"
_REGION = "us-east-1"
"""What the client takes where none is said."""


@final
class Unended:
    """Comes to the uploads of one store, by another client than the one that moves its bytes.

    Args:
        clients: Those of the store.
        url: Its address.
    """

    def __init__(self, clients: Clients, url: str) -> None:
        self._clients = clients
        self._url = url
        self._lock = threading.Lock()
        self._uploads: S3Uploads | None = None
        self._why_unusable = ""

    def why_unseen(self) -> str:
        """Return in plain words why they cannot be shown; or nothing.

        The client is made to know it. Where that fails nobody is kept from anything: to see
        uploads is housekeeping.
        """
        if self._clients.is_azure:
            return "Azure removes blocks that belong to nothing after a week"
        if not self._clients.is_s3:
            return f"not visible with the credentials of this client; {_RULE}"
        if self._clients.has_own_credentials:
            return f"not visible with credentials that a program gives; {_RULE}"
        if importlib.util.find_spec("boto3") is None:
            return f"not visible without boto3 (pip install 'milepost[s3]'); {_RULE}"
        return "" if self._get() is not None else self._why_unusable

    def uploads(self) -> S3Uploads:
        """Return what shows them.

        Raises:
            UsageError: Nothing does.
        """
        why = self.why_unseen()
        shown = None if why else self._get()
        if shown is None:
            raise UsageError(f"The uploads of {self._url} are {why}.", path=self._url)
        return shown

    def _get(self) -> S3Uploads | None:
        """Return what shows them, made by the first call; or say once why it cannot be made."""
        with self._lock:
            if self._uploads is None and not self._why_unusable:
                try:
                    self._uploads = self._make()
                except Exception as error:  # noqa: BLE001 - of a library: whatever it is, see above
                    # Its text may hold what it was given.
                    kind = type(error).__name__
                    self._why_unusable = (
                        f"not visible: boto3 is installed but cannot be used here ({kind}); {_RULE}"
                    )
                    _log.warning("Uploads of %s are %s.", self._url, self._why_unusable)
            return self._uploads

    def _make(self) -> S3Uploads:
        from .unended_s3 import Access, S3Uploads

        option = self._clients.s3_option
        access = Access(
            endpoint=self._clients.endpoint,
            region=option("region", "default_region") or _REGION,
            key_id=option("access_key_id"),
            secret=option("secret_access_key"),
            token=option("session_token", "token"),
            is_unsigned=option("skip_signature").lower() == "true",
            is_bucket_in_host=option("virtual_hosted_style_request").lower() == "true",
        )
        parts = urlsplit(self._url)
        return S3Uploads(parts.netloc, parts.path.strip("/"), access, url=self._url)
