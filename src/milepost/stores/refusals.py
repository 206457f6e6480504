"""What the service of a bucket says when it does not do what was asked, as an error of ours.

The client says it in a text: the answer's status and code are in it, and sometimes more than
anybody should see, such as signed addresses. What is told on is the status, the code and how often
it was tried.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import (
    AccessError,
    CheckpointError,
    ExistsError,
    MissingError,
    NoSpaceError,
    StorageError,
)

__all__ = ["UnknownAnswerError", "is_passing", "says_slow_down", "typed_error", "whole_range"]


class UnknownAnswerError(Exception):
    """An answer that the service cannot have given; internal, turned into a ``StorageError``."""


def whole_range(part: memoryview, length: int) -> memoryview:
    """Return what was answered for a range of an object that has it, if all of it came.

    Raises:
        UnknownAnswerError: It did not; the next answer may bring it.
    """
    if part.nbytes != length:
        raise UnknownAnswerError(f"{part.nbytes:,} of {length:,} bytes came")
    return part


_CODE = re.compile(
    r"<Code>(\w{1,64})</Code>|\"code\":\s*\"(\w{1,64})\"|\(code: (\w{1,64})\)|code: \"(\w{1,64})\""
)
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_RETRIES = re.compile(r"after (\d{1,4}) retries|retries: (\d{1,4})")
_BARE_REDIRECT = "BareRedirect"

_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_NO_ACCESS = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_HINTS = {
    "ExpiredToken": "The credentials have expired; get new ones, or let them be renewed by the "
    "role of the machine.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong; set it.",
}
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_NO_SPACE = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_CONFLICTS = frozenset({"ConditionalRequestConflict", "OperationAborted"})
"""Two requests for one key met. Nothing is said of what is there."""

_PASSING = _CONFLICTS | {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "InvalidPart",
    "Md5Mismatch",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_SLOW_DOWN = frozenset(
    {"RequestLimitExceeded", "ServerBusy", "SlowDown", "Throttling", "ThrottlingException"}
)
_NEED_A_KEY = frozenset({"copy", "delete", "get", "look at", "read"})
"""Operations for which "not found" means the object; for the others it is a part of the place."""

_SAFE = "Earlier checkpoints are intact."


def typed_error(
    text: str,
    kind: str,
    *,
    operation: str,
    name: str,
    key: str,
    endpoint: str = "",
    tries: int = 1,
) -> CheckpointError:
    """Return the error to raise.

    Args:
        text: What the client said.
        kind: Name of the class of its error, or what happened in plain words.
        operation: What was being done.
        name: The full address of the object.
        key: Its key.
        endpoint: The address of the service, if it is not that of the provider.
        tries: How often it was tried, if the client does not say more.
    """
    code = _first(_CODE, text)
    status = 301 if _BARE_REDIRECT in text else int(_first(_STATUS, text) or 0)
    tries = max(tries, int(_first(_RETRIES, text) or 0) + 1)
    said = ", ".join(filter(None, (f"status {status}" if status else "", code)))
    what = f"Could not {operation} {name}: {said or _kind(text, kind)}" + (
        f", after {tries} tries." if tries > 1 else "."
    )
    facts: dict[str, Any] = {
        "operation": operation,
        "path": key,
        "status": status or None,
        "code": code or None,
        "tries": tries,
    }
    is_refused = kind in ("PermissionDeniedError", "UnauthenticatedError")
    if code in _NO_BUCKET:
        at = f" at {_without_user(endpoint)}" if endpoint else ""
        hint = f"There is no such bucket{at}; create it, or look at the address."
        return StorageError(what, safe=_SAFE, hint=hint, **facts)
    if is_refused or code in _NO_ACCESS or status in (401, 403):
        hint = _HINTS.get(
            code,
            "Look at the credentials of this process, and at what they are allowed to do there.",
        )
        return AccessError(what, safe=_SAFE, hint=hint, **facts)
    if code in _ELSEWHERE or status == 301:
        hint = "The bucket is in another region or at another endpoint than was said."
        return StorageError(what, safe=_SAFE, hint=hint, **facts)
    is_missing = kind in ("NotFoundError", "FileNotFoundError") or status == 404
    if is_missing and operation in _NEED_A_KEY:
        return MissingError(f"There is no {name}.", **facts)
    is_there = kind in ("AlreadyExistsError", "PreconditionError")
    if is_there and operation == "create" and code not in _CONFLICTS:
        return ExistsError(f"There is already a {name}.", **facts)
    if code in _NO_SPACE or status == 507:
        hint = "Make room there, or keep fewer checkpoints."
        return NoSpaceError(what, safe=_SAFE, hint=hint, **facts)
    return StorageError(what, safe=_SAFE, hint="The place may be unwell; try again later.", **facts)


def is_passing(error: CheckpointError) -> bool:
    """Return whether the same request may succeed a little later."""
    if not isinstance(error, StorageError) or isinstance(error, NoSpaceError):
        return False
    status, code = error.facts.get("status"), error.facts.get("code")
    if code in _NO_BUCKET or code in _ELSEWHERE:
        return False
    # Without a status nothing was answered, or nothing that the client understands; and some
    # services put an error into an answer that begins with 200.
    return (
        status is None or status < 300 or status >= 500 or status in (408, 429) or code in _PASSING
    )


def says_slow_down(error: CheckpointError) -> bool:
    """Return whether the service asked for fewer requests."""
    return error.facts.get("status") in (429, 503) or error.facts.get("code") in _SLOW_DOWN


def _kind(text: str, kind: str) -> str:
    """Return in plain words what went wrong where nothing was answered."""
    for mark, said in (
        ("kind: Timeout", "no answer in time"),
        ("kind: Connect", "no connection"),
        ("kind: Request", "the connection broke"),
        ("kind: Decode", "the answer broke off"),
        ("kind: Interrupted", "the answer broke off"),
    ):
        if mark in text:
            return said
    return kind


def _without_user(endpoint: str) -> str:
    """Return an address without a name and a password in it."""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next(filter(None, found.groups()), "") if found else ""
