"""Every key name inside a run. Nobody else joins paths.

A *key* is a relative path with forward slashes. Inside a run:

    run.json                        format version and run id
    sessions/00000001.json          one life of the writing job
    sessions/00000001.from.json     the checkpoint that this session went on from
    pins/ep3.json                   protects ep3 from retention
    validations/ep3-1f0c5a...       what is asked, tried and found out about ep3 by one attempt:
                                    .request.json, .attempt-1.json, .attempt-1-end.json,
                                    .verdict.json
    latest                          for people: the name of the newest checkpoint
    ep3/attempt.json                the claim of this folder by one attempt
    ep3/model.safetensors ...       the parts
    ep3/index.json                  trees and tensor table
    ep3/index-r00003.json           what one of several ranks wrote
    ep3/manifest.json               the commit
    ep3/metadata.json               what users add afterwards; not part of the commit
    ep3/deleted.json                the manifest of a checkpoint that is being deleted, or the claim
                                    of an attempt that is being given up
    nan/ba37/...                    a diagnostic checkpoint, never the newest

A run that writes single files for people (``ep3.pt``) keeps all of the above under ``.milepost/``.
"""

from __future__ import annotations

import re

from ..errors import FormatError, UsageError

__all__ = [
    "ATTEMPT",
    "DELETED",
    "DIAGNOSTIC_FOLDERS",
    "HIDDEN",
    "INDEX",
    "LATEST",
    "MANIFEST",
    "METADATA",
    "PINS",
    "RUN",
    "SESSIONS",
    "VALIDATIONS",
    "check_key",
    "check_name",
    "folder_name",
    "from_key",
    "is_key",
    "part_file",
    "pin_key",
    "rank_index",
    "safe_name",
    "session_key",
    "session_number",
]

RUN = "run.json"
SESSIONS = "sessions"
PINS = "pins"
VALIDATIONS = "validations"
LATEST = "latest"
HIDDEN = ".milepost"
ATTEMPT = "attempt.json"
INDEX = "index.json"
MANIFEST = "manifest.json"
DELETED = "deleted.json"
METADATA = "metadata.json"
DIAGNOSTIC_FOLDERS = ("nan", "failed")
"""Folders of checkpoints kept for a look at what went wrong: never the newest, never pruned."""

_RESERVED = frozenset({RUN, SESSIONS, PINS, LATEST, "events", VALIDATIONS, *DIAGNOSTIC_FOLDERS})
_NAME = re.compile(r"[A-Za-z0-9_+=@,~][A-Za-z0-9._+=@,~-]*")
_MAX_NAME_BYTES = 128
_MAX_KEY_BYTES = 1024
_KEY_PART = re.compile(r"[A-Za-z0-9._+=@,~-]+")
_SESSION = re.compile(r"([0-9]{8,})\.json")


def check_name(name: str) -> str:
    """Return ``name`` if it may name a checkpoint.

    Raises:
        UsageError: Empty, too long, reserved, or with a character that some place does not take.
    """
    if (
        not isinstance(name, str)
        or not _NAME.fullmatch(name)
        or len(name) > _MAX_NAME_BYTES
        or name in _RESERVED
    ):
        raise UsageError(
            f"{name!r} cannot name a checkpoint.",
            hint=f"Use at most {_MAX_NAME_BYTES} letters, digits and '._+=@,~-', not beginning "
            f"with '.' or '-', and none of {', '.join(sorted(_RESERVED))}.",
            name=name,
        )
    return name


def safe_name(text: str) -> str:
    """Return a valid checkpoint name close to ``text``.

    Slashes, colons, spaces and other characters that a place may refuse become ``_``. A name that
    is too long keeps its beginning and ends in 8 hex digits of a digest of the whole, so that two
    names that differ stay different.
    """
    import hashlib

    name = re.sub(r"[^A-Za-z0-9._+=@,~-]", "_", text)
    if name[:1] in ("", ".", "-"):
        name = "_" + name
    if name in _RESERVED:
        name = "_" + name
    if len(name) > _MAX_NAME_BYTES:
        tail = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
        name = f"{name[: _MAX_NAME_BYTES - 9]}~{tail}"
    return name


def folder_name(name: str, session: int, attempt: int) -> str:
    """Return the folder to claim when ``name`` itself is taken: ``ep3-s2``, then ``ep3-s2a7``."""
    suffix = f"-s{session}" if attempt == 0 else f"-s{session}a{attempt}"
    return name[: _MAX_NAME_BYTES - len(suffix)] + suffix


def check_key(key: object, *, where: str) -> str:
    """Return ``key`` if it is a safe relative path; it may come from a stranger's file.

    Raises:
        FormatError: Absolute, with ``..``, an empty part, a backslash, a drive, or a control
            character.
    """
    if not isinstance(key, str) or not is_key(key):
        raise FormatError(
            f"{where} names a file {str(key)[:120]!r} that leads out of its folder or holds "
            "characters that are not allowed.",
            path=where,
        )
    return key


def is_key(text: str) -> bool:
    """Return whether a text is a key, and so a name that every place takes."""
    return len(text) <= _MAX_KEY_BYTES and all(
        _KEY_PART.fullmatch(part) and part not in (".", "..") for part in text.split("/")
    )


def session_key(number: int) -> str:
    """Return the key of a session's record."""
    return f"{SESSIONS}/{number:08d}.json"


def from_key(number: int) -> str:
    """Return the key of the record of what a session went on from."""
    return f"{SESSIONS}/{number:08d}.from.json"


def session_number(key: str) -> int | None:
    """Return the number in a session's key, or ``None`` if it is another kind of key."""
    match = _SESSION.fullmatch(key.rpartition("/")[2])
    return int(match[1]) if match else None


def pin_key(name: str) -> str:
    """Return the key of the pin of a checkpoint."""
    return f"{PINS}/{name}.json"


def rank_index(rank: int) -> str:
    """Return the file name of the table of what one of several ranks wrote."""
    return f"index-r{rank:05d}.json"


def part_file(item: str, *, variant: str = "", rank: int | None = None) -> str:
    """Return the file name of a part: ``model.safetensors``, ``model-frozen-r00003.safetensors``.

    Args:
        item: Name of the item, already a valid file name.
        variant: Splits an item in two, as in ``"frozen"``.
        rank: Writing rank when several ranks write, else ``None``.
    """
    name = item if not variant else f"{item}-{variant}"
    return f"{name}.safetensors" if rank is None else f"{name}-r{rank:05d}.safetensors"
