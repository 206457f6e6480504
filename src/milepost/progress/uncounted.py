"""Loops that do not count what their saves go by: without a word they would save nothing."""

from __future__ import annotations

from ..errors import UsageError

__all__ = ["NO_EPOCHS_NOTE", "refuse_end", "refuse_second_pass"]

NO_EPOCHS_NOTE = (
    "A loader was iterated once more with run.batches(), and no epoch was counted, for the loop "
    "does not take its epochs from run.epochs(). A loop over range() begins at its first epoch "
    "again after a resume and trains too long, and its end is not saved."
)

_HINT = (
    "Write for epoch in run.epochs(n), and in it for batch in run.batches(loader); or call "
    'run.step() after each batch, with an interval such as every="100ba".'
)


def refuse_second_pass(*, looked_at: str) -> None:
    """Refuse to iterate a loader once more where saves are due after epochs only.

    Args:
        looked_at: Where the state is kept for a look; empty if it is not.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        "A loader is iterated once more with run.batches(), saves are due after epochs, and no "
        "epoch was counted.",
        safe=_safe(looked_at),
        hint=_HINT,
    )


def refuse_end(*, is_batch_counted: bool, looked_at: str) -> None:
    """Refuse to end well where saves should have been due and nothing was saved.

    Args:
        is_batch_counted: Whether batches were counted, and epochs were not.
        looked_at: Where the state at the end is kept for a look; empty if it is not.

    Raises:
        UsageError: Always.
    """
    what = (
        "saves are due after epochs, and only batches were counted"
        if is_batch_counted
        else "optimizers took steps, and neither a batch nor an epoch was counted"
    )
    raise UsageError(
        f"The training ended, and nothing was saved although every= is set: {what}.",
        safe=_safe(looked_at),
        hint=_HINT,
    )


def _safe(looked_at: str) -> str:
    return f"The state is in {looked_at}, for a look." if looked_at else ""
