"""Names of the folders of a run, and of the files in them."""

from __future__ import annotations

from ..format.layout import (
    DIAGNOSTIC_FOLDERS,
    HIDDEN,
    PINS,
    SESSIONS,
    VALIDATIONS,
    check_name,
    folder_name,
)

__all__ = ["NOT_CHECKPOINTS", "candidates", "check_folder", "file_key", "is_diagnostic"]

NOT_CHECKPOINTS = frozenset({SESSIONS, PINS, HIDDEN, "events", VALIDATIONS, "lost+found"})
"""Folders of a run that never hold a checkpoint; the last one is the file system's own."""


def file_key(folder: str, file: str) -> str:
    """Return the key of a file of a checkpoint; ``""`` is the folder that the store stands in."""
    return f"{folder}/{file}" if folder else file


def is_diagnostic(name: str) -> bool:
    """Return whether a checkpoint's name leads below ``nan/`` or ``failed/``."""
    head, slash, _ = name.partition("/")
    return bool(slash) and head in DIAGNOSTIC_FOLDERS


def check_folder(name: str) -> str:
    """Return ``name`` if it may be a checkpoint's folder: ``ep3`` or ``nan/ba37``.

    Raises:
        UsageError: It may not.
    """
    check_name(name.partition("/")[2] if is_diagnostic(name) else name)
    return name


def candidates(name: str, session: int, attempt: int) -> tuple[str, ...]:
    """Return the folders to try for a checkpoint, the wanted name first."""
    head, slash, rest = name.partition("/") if is_diagnostic(name) else ("", "", name)
    others = (folder_name(rest, session, 0), folder_name(rest, session, attempt))
    return tuple(dict.fromkeys((name, *(f"{head}{slash}{other}" for other in others))))
