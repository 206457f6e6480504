"""Names of checkpoints, and metrics as numbers."""

from __future__ import annotations

import logging
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
            ``"{epoch}-{val/loss:.3f}"``; the name of a metric may hold dots, brackets and colons.
            Characters that a place may refuse become ``_``, and a name that is too long is cut and
            ends in a digest that keeps it apart from others.

    Raises:
        UsageError: A malformed pattern.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            self._parts = [
                (literal, None if name is None else _field(name, spec, conversion))
                for literal, name, spec, conversion in string.Formatter().parse(pattern)
            ]
        except ValueError as error:
            raise UsageError(f"save_name_format={pattern!r} is malformed: {error}.") from error
        fields = [field for _, field in self._parts if field is not None]
        if any(not field or field.isdecimal() for field in fields):
            raise UsageError(
                f"save_name_format={pattern!r} has a field without a name.",
                hint='Use fields such as "{name}" or "ep{epoch}-ba{batch}".',
            )
        if not fields:
            raise UsageError(
                f"save_name_format={pattern!r} gives every checkpoint the same name.",
                hint='Use fields such as "{name}" or "ep{epoch}-ba{batch}".',
            )

    def name(self, plain: str, counters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """Return the name of a checkpoint; a metric that was not logged is written as ``nan``."""
        values = {**metrics, **counters, "name": plain}
        text = ""
        for literal, field in self._parts:
            text += literal + ("" if field is None else self._written(field, values))
        return safe_name(text)

    def _written(self, field: str, values: Mapping[str, Any]) -> str:
        """Return the text in the place of one field."""
        known = [name for name in values if field == name or field.startswith(f"{name}:")]
        if not known:
            _log.warning("save_name_format names %r, which was not logged.", field)
            return "nan"
        name = max(known, key=len)
        try:
            return format(values[name], field[len(name) + 1 :])
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"save_name_format={self.pattern!r} does not fit its values: {error}."
            ) from error


def _field(name: str, spec: str | None, conversion: str | None) -> str:
    """Return what stands between two braces, as it was written."""
    return name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")


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
