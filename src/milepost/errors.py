"""The one tree of errors.

Every error says three things: what happened, what is safe now, and what to do next. Callers
match on the class or on ``kind`` (a stable code that is never renamed), never on the text.
``facts`` holds the pieces of the message as data: path, expected, found, and so on.

    CheckpointError
      UsageError (ValueError)              the call makes no sense as written
        DuplicateNameError                   two things were given one name
      MissingError (FileNotFoundError)     no such run, checkpoint or file
      ExistsError (FileExistsError)        something is already there and would be overwritten
      AccessError (PermissionError)        the place refused us; says nothing about what is there
      StorageError (OSError)               a read or a write failed
        NoSpaceError                         no room left, or a quota was reached
      DeadlineError (TimeoutError)         something waited for did not come in time
      FormatError (ValueError)             bytes that are not what they claim to be
        NewerFormatError                     written by a newer Milepost
        DamagedError                         a checksum, size or digest does not match
        IncompleteError                      a checkpoint without a commit, or with files missing
      InUseError                           somebody reads what was to be deleted
      FencedError                          a newer session owns the run; this one must stop
      UnsupportedStateError (TypeError)    a value in the state that cannot be stored
      MismatchError (ValueError)           a checkpoint does not fit the objects it is loaded into
      NonFiniteLossError (ArithmeticError) the loss became NaN or infinite
      SaveFailedError                      several saves in a row failed
      StateChangedError                    the state changed while it was being copied
      RankFailedError                      another rank failed, or the ranks do not agree
      NodeLostError                        a machine of a launch cannot be reached any more
      LaunchFailedError                    a worker failed, and no attempt is left

``Preempted`` stands outside the tree: it is a ``SystemExit``, raised once the state is safe after
SIGTERM or SIGUSR1, so that the process ends with the documented exit code.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AccessError",
    "CheckpointError",
    "DamagedError",
    "DeadlineError",
    "DuplicateNameError",
    "ExistsError",
    "FencedError",
    "FormatError",
    "InUseError",
    "IncompleteError",
    "LaunchFailedError",
    "MismatchError",
    "MissingError",
    "NewerFormatError",
    "NoSpaceError",
    "NodeLostError",
    "NonFiniteLossError",
    "Preempted",
    "RankFailedError",
    "SaveFailedError",
    "StateChangedError",
    "StorageError",
    "UnsupportedStateError",
    "UsageError",
    "storage_error",
]


class CheckpointError(Exception):
    """Base of every error that Milepost raises on purpose.

    Args:
        what: What happened, naming the thing it happened to.
        safe: What is safe now, such as the checkpoints that are still whole.
        hint: What to do next.
        **facts: The pieces of the message as data, kept in ``.facts``.
    """

    kind: ClassVar[str] = "checkpoint"

    def __init__(self, what: str, *, safe: str = "", hint: str = "", **facts: Any) -> None:
        super().__init__(" ".join(part for part in (what, safe, hint) if part))
        self.what = what
        self.safe = safe
        self.hint = hint
        self.facts: Mapping[str, Any] = facts

    def __reduce__(self) -> tuple[Any, ...]:
        # An OSError keeps errno and filename outside of __dict__, and its own __reduce__ drops
        # them; errors travel between ranks whole.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            for name in ("errno", "strerror", "filename"):
                state[name] = getattr(self, name)
        return _rebuild, (type(self), self.what, self.safe, self.hint), state

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.safe, self.hint) if part)


class UsageError(CheckpointError, ValueError):
    """A call that makes no sense as written."""

    kind = "usage"


class DuplicateNameError(UsageError):
    """Two tracked objects, callbacks or evaluators were given one name."""

    kind = "duplicate_name"


class MissingError(CheckpointError, FileNotFoundError):
    """A run, checkpoint or file that is not there."""

    kind = "missing"


class ExistsError(CheckpointError, FileExistsError):
    """Something is already there and would have been overwritten."""

    kind = "exists"


class AccessError(CheckpointError, PermissionError):
    """The place refused access. Never read as "nothing is there"."""

    kind = "access"


class StorageError(CheckpointError, OSError):
    """A read or a write failed. ``facts`` holds operation, path and errno."""

    kind = "storage"


class NoSpaceError(StorageError):
    """No room left on the device, or a quota or file size limit was reached."""

    kind = "no_space"


class DeadlineError(CheckpointError, TimeoutError):
    """Something waited for did not come in time."""

    kind = "deadline"


class FormatError(CheckpointError, ValueError):
    """Bytes that are not what they claim to be."""

    kind = "format"


class NewerFormatError(FormatError):
    """Written by a newer Milepost than this one."""

    kind = "newer_format"


class DamagedError(FormatError):
    """A checksum, size or digest does not match. ``facts`` names file, block and tensors."""

    kind = "damaged"


class IncompleteError(FormatError):
    """A checkpoint without a commit, or with files missing."""

    kind = "incomplete"


class InUseError(CheckpointError):
    """Somebody reads what was to be deleted. Try again later."""

    kind = "in_use"


class FencedError(CheckpointError):
    """A newer session owns the run. This one must stop writing and must delete nothing."""

    kind = "fenced"


class UnsupportedStateError(CheckpointError, TypeError):
    """A value in the state that cannot be stored. ``facts["path"]`` leads to it."""

    kind = "unsupported_state"


class MismatchError(CheckpointError, ValueError):
    """A checkpoint that does not fit the objects it is loaded into.

    ``facts["report"]`` is the ``LoadReport`` with everything missing, unexpected, mis-shaped and
    mis-typed.
    """

    kind = "mismatch"


class NonFiniteLossError(CheckpointError, ArithmeticError):
    """The loss became NaN or infinite. ``facts["checkpoint"]`` names the diagnostic checkpoint."""

    kind = "non_finite_loss"


class SaveFailedError(CheckpointError):
    """More saves in a row failed than ``on_save_error`` allows. ``__cause__`` is the last one."""

    kind = "save_failed"


class StateChangedError(CheckpointError):
    """The state changed while it was being copied for a save. ``facts`` names the tensors."""

    kind = "state_changed"


class RankFailedError(CheckpointError):
    """Another rank failed, or the ranks do not agree; every rank raises the same.

    ``facts["ranks"]`` lists them and ``facts["errors"]`` maps each to the name of its error.
    """

    kind = "rank_failed"


class NodeLostError(CheckpointError):
    """A machine of a launch cannot be reached any more. ``facts["node"]`` names it."""

    kind = "node_lost"


class LaunchFailedError(CheckpointError):
    """A worker failed, and no attempt is left."""

    kind = "launch_failed"

    @property
    def result(self) -> Any:
        """Return the ``LaunchResult``: what every attempt did, and what is kept."""
        return self.facts.get("result")


class Preempted(SystemExit):
    """The process was asked to end, and the state is safe.

    A ``SystemExit`` with code ``128 + signal number``: 143 after SIGTERM, 138 after SIGUSR1.
    ``except Exception`` does not catch it.

    Args:
        signal_number: The signal that asked for it.
        checkpoint: Name of the checkpoint that holds the state, or ``None`` when nothing could be
            saved within the grace period.
    """

    def __init__(self, signal_number: int, checkpoint: str | None) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal_number, self.checkpoint)


def _rebuild(cls: type[CheckpointError], what: str, safe: str, hint: str) -> CheckpointError:
    return cls(what, safe=safe, hint=hint)


_NO_SPACE = frozenset({_errno.ENOSPC, _errno.EDQUOT, _errno.EFBIG})
_ACCESS = frozenset({_errno.EACCES, _errno.EPERM, _errno.EROFS})


def storage_error(error: OSError, *, operation: str, path: str) -> CheckpointError:
    """Turn an operating system error into the typed error of this tree.

    Args:
        error: What the system call raised.
        operation: What was being done: ``"write"``, ``"fsync"``, ``"open"``, ...
        path: The file or key it was done to.

    Returns:
        An error to ``raise ... from error``. Its ``errno``, ``strerror`` and ``filename`` are set.
    """
    kind: type[CheckpointError]
    hint = ""
    if error.errno in _NO_SPACE:
        kind, hint = NoSpaceError, "Free some space, or keep fewer checkpoints."
        if error.errno == _errno.EFBIG:  # a disk with room refuses too, and freeing helps nothing
            hint = "Raise the limit on the size of a file (ulimit -f), or use another file system."
    elif error.errno in _ACCESS:
        kind, hint = AccessError, "Check the owner, the mode and the mount options of the folder."
    elif error.errno == _errno.ENOENT:
        kind = MissingError
    elif error.errno == _errno.EEXIST:
        kind = ExistsError
    else:
        kind = StorageError
    name = _errno.errorcode.get(error.errno or 0, "unknown error")
    typed = kind(
        f"Could not {operation} {path}: {error.strerror or error} ({name}).",
        hint=hint,
        operation=operation,
        path=path,
        errno=error.errno,
    )
    assert isinstance(typed, OSError)
    typed.errno, typed.strerror, typed.filename = error.errno, error.strerror, path
    return typed
