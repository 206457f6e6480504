"""Lines that are printed with an error, and closing that loses none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

__all__ = ["attach_note", "close_all"]

_log = logging.getLogger(__name__)


def attach_note(error: BaseException, text: str) -> None:
    """Add a line to what is printed with an error; logged where Python cannot (3.10)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        _log.error("%s", text)


def close_all(steps: Sequence[Callable[[], None]], error: BaseException | None) -> None:
    """Take every step, and let no failure in one hide the error that came before.

    Raises:
        Exception: The first failure, where no error came before.
    """
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as failure:  # noqa: BLE001 - raised below, or noted
            earlier = error or first
            if earlier is None:
                first = failure
            else:
                attach_note(earlier, f"Another error while closing: {failure!r}")
    if first is not None:
        raise first
