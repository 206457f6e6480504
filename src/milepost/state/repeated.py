"""Notes about what a loop does once more after a resume, although the state has it already."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["changed_before_note", "done_again_note", "listed"]


def done_again_note(changed: Iterable[str]) -> str:
    """Return the note of a checkpoint made between the last batch of an epoch and the next epoch.

    Args:
        changed: What the loop had changed there by then; if nothing, there is nothing to note.
    """
    names = listed(changed)
    return names and (
        "This was saved after the last batch of an epoch and before the epoch was counted, and by "
        f"then the loop had changed {names}. After a resume from it, what the loop does there is "
        "done again, and so is that. To keep the best, log what it is judged by there, "
        "run.log(val=...), and let every='1ep' save and keep=KeepBest(1, 'val') keep it: that save "
        "comes when the epoch is counted."
    )


def changed_before_note(changed: Iterable[str]) -> str:
    """Return the note of a checkpoint made before anything was computed from the batch in hand.

    Args:
        changed: What the loop had changed by then; if nothing, there is nothing to note.
    """
    names = listed(changed)
    return names and (
        "This was saved before anything was computed from the batch in hand, and by then the loop "
        f"had changed {names}. After a resume from it the batch is trained again, and that changed "
        "again. Save at the end of the loop's body."
    )


def listed(names: Iterable[str]) -> str:
    """Return names as text, each once."""
    return ", ".join(dict.fromkeys(names))
