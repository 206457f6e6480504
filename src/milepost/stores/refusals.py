"""What the service of a bucket says when it does not do what was asked, as an error of ours.

The client says it in a text: the answer's status and code are in it, and sometimes more than
anybody should see, such as signed addresses. What is told on is the status, the code and how often
it was tried.
"""

from __future__ import annotations

import re

from ..errors import AccessError, CheckpointError, ExistsError, MissingError, StorageError

__all__ = ["typed_error"]

_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\"code\":\s*\"(\w{1,64})\"")
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_RETRIES = re.compile(r"after (\d{1,4}) retries|retries: (\d{1,4})")

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
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_SAFE = "Earlier checkpoints are intact."


def typed_error(text: str, kind: str, *, operation: str, name: str, key: str) -> CheckpointError:
    """Return the error to raise.

    Args:
        text: What the client said.
        kind: Name of the class of its error.
        operation: What was being done.
        name: The full address of the object.
        key: Its key.
    """
    code = _first(_CODE, text)
    status = int(_first(_STATUS, text) or 0)
    tries = int(_first(_RETRIES, text) or 0) + 1
    said = ", ".join(filter(None, (f"status {status}" if status else "", code))) or _kind(
        text, kind
    )
    what = f"Could not {operation} {name}: {said}" + (
        f", after {tries} tries." if tries > 1 else "."
    )
    facts = {
        "operation": operation,
        "path": key,
        "status": status or None,
        "code": code or None,
        "tries": tries,
    }
    if code in _NO_BUCKET:
        hint = "There is no such bucket; create it, or look at the address."
        return StorageError(what, safe=_SAFE, hint=hint, **facts)
    if (
        kind in ("PermissionDeniedError", "UnauthenticatedError")
        or code in _NO_ACCESS
        or status in (401, 403)
    ):
        hint = "Look at the credentials of this process, and at what they are allowed to do there."
        return AccessError(what, safe=_SAFE, hint=hint, **facts)
    if code in _ELSEWHERE or status == 301:
        hint = "The bucket is in another region or at another endpoint than was said."
        return StorageError(what, safe=_SAFE, hint=hint, **facts)
    if kind in ("NotFoundError", "FileNotFoundError") or status == 404:
        return MissingError(f"There is no {name}.", path=key)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return ExistsError(f"There is already a {name}.", path=key)
    return StorageError(what, safe=_SAFE, hint="The place may be unwell; try again later.", **facts)


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


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next(filter(None, found.groups()), "") if found else ""
