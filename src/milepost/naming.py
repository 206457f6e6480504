"""Names of checkpoints, and metrics as numbers."""

from __future__ import annotations

import logging
import string
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from .errors import UsageError
from .format.layout import safe_name
from .progress.timer import Timer

__all__ = ["NameFormat", "as_number", "natural_name"]

_log = logging.getLogger("milepost")

_RANK = {"rank": 0}  # of several ranks all save one checkpoint, and rank 0 commits it
_PROGRESS: Mapping[str, Any] = {"name": "ba0", **_RANK, **Timer().snapshot()}
"""What is known of every checkpoint, with a value of the kind that each has."""

_MAX_BITS = 1023


class NameFormat:
    """A pattern for the names of checkpoints.

    Args:
        pattern: Text with fields in braces: ``name`` (what the schedule calls it), any counter of
            the timer such as ``epoch`` or ``batch``, ``rank`` (0: all ranks save one checkpoint),
            and any logged metric, as in ``"{epoch}-{val/loss:.3f}"``; the name of a metric may hold
            dots, brackets and colons.
            Characters that a place may refuse become ``_``, and a name that is too long is cut and
            ends in a digest that keeps it apart from others.

    Raises:
        UsageError: A malformed pattern, or a field that no checkpoint could fill.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            parsed = list(string.Formatter().parse(pattern))
        except (ValueError, TypeError) as error:
            raise UsageError(f"save_name_format={pattern!r} is malformed: {error}.") from error
        self._parts = [
            (literal, None if name is None else _field(name, spec, conversion))
            for literal, name, spec, conversion in parsed
        ]
        names = [name for _, name, _, _ in parsed if name is not None]
        if any(not name or name.isdecimal() for name in names):
            raise self._refusal("has a field without a name")
        if not names:
            raise self._refusal("gives every checkpoint the same name")
        for _, name, spec, conversion in parsed:
            if name in _PROGRESS and conversion:
                raise self._refusal(f"converts {name} with !{conversion}, which is not done")
            if spec and "{" in spec:
                raise self._refusal(f"has a field within the format of {name}")
        for field in self._fields:
            # The name of a metric may hold colons; behind a counter's they begin its format.
            if _match(field, _PROGRESS) is not None:
                self._written(field, _PROGRESS)

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Refuse fields that are neither of the progress nor among these metrics.

        Args:
            metrics: Every metric that the checkpoints can have.

        Raises:
            UsageError: Naming the field and what there is.
        """
        known = [*_PROGRESS, *metrics]
        for field in self._fields:
            if _match(field, known) is None:
                meant = get_close_matches(field.partition(":")[0], known, n=1)
                raise UsageError(
                    f"save_name_format={self.pattern!r} names {field!r}, which no checkpoint "
                    "of this training has.",
                    hint=(f"Was {{{meant[0]}}} meant? " if meant else "")
                    + f"The fields are: {', '.join(known)}.",
                    field=field,
                )

    def name(self, plain: str, counters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """Return the name of a checkpoint; a metric that was not logged is written as ``nan``."""
        values = {**metrics, **counters, **_RANK, "name": plain}
        text = ""
        for literal, field in self._parts:
            text += literal + ("" if field is None else self._written(field, values))
        return safe_name(text)

    def _written(self, field: str, values: Mapping[str, Any]) -> str:
        """Return the text in the place of one field."""
        name = _match(field, values)
        if name is None:
            _log.warning("save_name_format names %r, which was not logged.", field)
            return "nan"
        try:
            return format(values[name], field[len(name) + 1 :])
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"save_name_format={self.pattern!r} does not fit its values: {error}."
            ) from error

    @property
    def _fields(self) -> list[str]:
        return [field for _, field in self._parts if field is not None]

    def _refusal(self, why: str) -> UsageError:
        return UsageError(
            f"save_name_format={self.pattern!r} {why}.",
            hint='Use fields such as "{name}", "ep{epoch}-ba{batch}" or "{loss:.3f}". '
            f"Besides metrics there are: {', '.join(_PROGRESS)}.",
        )


def _match(field: str, names: Collection[str]) -> str | None:
    """Return the name that a field begins with, the longest one, or ``None``."""
    found = [name for name in names if field == name or field.startswith(f"{name}:")]
    return max(found, key=len, default=None)


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
        UsageError: Several elements, no number at all, or one that no float comes close to.
    """
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise UsageError(f"The metric {name!r} is larger than any float.", name=name)
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
