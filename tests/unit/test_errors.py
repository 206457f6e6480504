"""The error tree: its shape is part of the interface."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from milepost import errors

# Append only: people match on kinds, on classes and on the builtin bases.
TREE = {
    "CheckpointError": ("checkpoint", (Exception,)),
    "UsageError": ("usage", (errors.CheckpointError, ValueError)),
    "DuplicateNameError": ("duplicate_name", (errors.UsageError,)),
    "MissingError": ("missing", (errors.CheckpointError, FileNotFoundError)),
    "ExistsError": ("exists", (errors.CheckpointError, FileExistsError)),
    "AccessError": ("access", (errors.CheckpointError, PermissionError)),
    "StorageError": ("storage", (errors.CheckpointError, OSError)),
    "NoSpaceError": ("no_space", (errors.StorageError,)),
    "DeadlineError": ("deadline", (errors.CheckpointError, TimeoutError)),
    "FormatError": ("format", (errors.CheckpointError, ValueError)),
    "NewerFormatError": ("newer_format", (errors.FormatError,)),
    "DamagedError": ("damaged", (errors.FormatError,)),
    "IncompleteError": ("incomplete", (errors.FormatError,)),
    "InUseError": ("in_use", (errors.CheckpointError,)),
    "FencedError": ("fenced", (errors.CheckpointError,)),
    "UnsupportedStateError": ("unsupported_state", (errors.CheckpointError, TypeError)),
    "MismatchError": ("mismatch", (errors.CheckpointError, ValueError)),
    "NonFiniteLossError": ("non_finite_loss", (errors.CheckpointError, ArithmeticError)),
    "SaveFailedError": ("save_failed", (errors.CheckpointError,)),
    "StateChangedError": ("state_changed", (errors.CheckpointError,)),
    "RankFailedError": ("rank_failed", (errors.CheckpointError,)),
    "NodeLostError": ("node_lost", (errors.CheckpointError,)),
    "LaunchFailedError": ("launch_failed", (errors.CheckpointError,)),
}
CLASSES = [getattr(errors, name) for name in TREE]


def test_tree_keeps_its_shape():
    """A kind or a base that changes breaks every caller that matches on it."""
    found = {
        name: (value.kind, value.__bases__)
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.CheckpointError)
    }
    assert found == TREE


def test_docstring_draws_the_whole_tree():
    """The drawing is what people read; a class missing from it does not exist for them."""
    missing = [name for name in errors.__all__ if name[0].isupper() and name not in errors.__doc__]
    assert missing == []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_message_says_what_is_safe_and_what_to_do(cls):
    """Also for the classes that are OSErrors, which print themselves in their own way."""
    error = cls("Broke.", safe="ep1 is whole.", hint="Retry.", path="a/b", found=3)
    assert str(error) == "Broke. ep1 is whole. Retry."
    assert error.facts == {"path": "a/b", "found": 3}
    assert str(cls("Broke.")) == "Broke."


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_survives_the_way_between_processes(cls, again):
    """A rank's error reaches the coordinator with every piece of it."""
    error = cls("Broke.", safe="ep1 is whole.", hint="Retry.", path="a/b", found=3)
    other = again(error)
    assert type(other) is cls
    assert (str(other), other.what, other.safe, other.hint, other.facts) == (
        "Broke. ep1 is whole. Retry.",
        "Broke.",
        "ep1 is whole.",
        "Retry.",
        {"path": "a/b", "found": 3},
    )


def test_a_limit_on_the_size_of_a_file_is_not_taken_for_a_full_disk():
    """Freeing space would help nothing."""
    full, limited = (
        errors.storage_error(OSError(code, "no"), operation="write", path="a")
        for code in (errno.ENOSPC, errno.EFBIG)
    )
    assert "Free some space" in full.hint
    assert "Free" not in limited.hint
    assert "ulimit -f" in limited.hint


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
        (errno.EFBIG, errors.NoSpaceError),
        (errno.EACCES, errors.AccessError),
        (errno.EPERM, errors.AccessError),
        (errno.EROFS, errors.AccessError),
        (errno.ENOENT, errors.MissingError),
        (errno.EEXIST, errors.ExistsError),
        (errno.EIO, errors.StorageError),
        (errno.ESTALE, errors.StorageError),
    ],
)
def test_system_error_becomes_its_typed_counterpart(code, cls):
    """A refused access must never look like a missing file, nor a full disk like a broken one."""
    typed = errors.storage_error(OSError(code, "words"), operation="write", path="runs/a")
    assert type(typed) is cls
    assert (typed.errno, typed.strerror, typed.filename) == (code, "words", "runs/a")
    assert typed.facts == {"operation": "write", "path": "runs/a", "errno": code}
    assert "write runs/a" in str(typed)
    assert errno.errorcode[code] in str(typed)


def test_system_error_keeps_its_number_between_processes():
    """OSError's own pickling drops errno when it has a message of one piece."""
    typed = errors.storage_error(OSError(errno.ENOSPC, "full"), operation="write", path="runs/a")
    other = pickle.loads(pickle.dumps(typed))
    assert (other.errno, other.strerror, other.filename) == (errno.ENOSPC, "full", "runs/a")


def test_system_error_without_a_number_is_still_told():
    """Some libraries raise a bare OSError with text only."""
    typed = errors.storage_error(OSError("the wire broke"), operation="read", path="k")
    assert type(typed) is errors.StorageError
    assert "the wire broke" in str(typed)


def test_preempted_is_an_exit_and_not_an_error():
    """``except Exception`` in a training loop must not swallow the request to end."""
    assert not issubclass(errors.Preempted, Exception)
    assert not issubclass(errors.Preempted, errors.CheckpointError)
    exit_ = pickle.loads(pickle.dumps(errors.Preempted(15, "ep3")))
    assert (exit_.code, exit_.signal_number, exit_.checkpoint) == (143, 15, "ep3")
