"""Names of checkpoints, and metrics as numbers."""

from __future__ import annotations

import logging
import math
import string
from collections.abc import Mapping
from typing import Any

from .errors import UsageError
from .format.layout import safe_name

__all__ = ["NameFormat", "as_number", "natural_name"]

_log = logging.getLogger("milepost")


class NameFormat:
    """A pattern for the names of checkpoints.

    Args:
        pattern: Text with fields in braces: ``name`` (what the schedule calls it), any counter of
            the timer such as ``epoch`` or ``batch``, and any logged metric, as in
            ``"{epoch}-{val/loss:.3f}"``. Characters that a place may refuse become ``_``, and a
            name that is too long is cut and ends in a digest that keeps it apart from others.

    Raises:
        UsageError: A malformed pattern.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(pattern) if name]
        except ValueError as error:
            raise UsageError(f"save_name_format={pattern!r} is malformed: {error}.") from error
        if not fields:
            raise UsageError(
                f"save_name_format={pattern!r} gives every checkpoint the same name.",
                hint='Use fields such as "{name}" or "ep{epoch}-ba{batch}".',
            )
        self._fields = fields

    def name(self, plain: str, counters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """Return the name of a checkpoint; a metric that was not logged is written as ``nan``."""
        values = {**metrics, **counters, "name": plain}
        for field in self._fields:
            if field not in values:
                _log.warning("save_name_format names %r, which was not logged.", field)
                values[field] = math.nan
        try:
            return safe_name(string.Formatter().vformat(self.pattern, (), _Fields(values)))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"save_name_format={self.pattern!r} does not fit its values: {error}."
            ) from error


class _Fields(dict[str, Any]):
    """Values by field name; a name with dots or brackets is looked up as a whole."""


def natural_name(counters: Mapping[str, Any]) -> str:
    """Return ``ep3`` right after an epoch and ``ba35`` within one."""
    if counters["batch_in_epoch"] == 0 and counters["epoch"]:
        return f"ep{counters['epoch']}"
    return f"ba{counters['batch']}"


def as_number(name: str, value: Any) -> int | float | bool:
    """Return a metric as a plain number.

    Args:
        name: Its name, for the message.
        value: A number, or a tensor or array of one element.

    Raises:
        UsageError: Several elements, or no number at all.
    """
    if isinstance(value, bool | int | float):
        return value
    size = getattr(value, "numel", None)
    count = size() if callable(size) else getattr(value, "size", 1)
    if callable(getattr(value, "item", None)) and count == 1:
        number = value.item()
        if isinstance(number, bool | int | float):
            return number
    raise UsageError(
        f"The metric {name!r} is not one number but {type(value).__qualname__}"
        + (f" of {count} elements." if isinstance(count, int) and count != 1 else "."),
        hint="Log a number, or a tensor of one element.",
        name=name,
    )
