"""Metrics as they are reported, or found by a validation.

Plain values, nested as they were given, and flat for scoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UsageError
from .naming import as_number

__all__ = ["flatten", "plain_metrics", "with_found"]

_MAX_DEPTH = 20


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as numbers, text and None, in dictionaries nested as they were.

    Numbers of NumPy and tensors of one element, on whatever device, become numbers of Python; NaN
    and infinities stay what they are.

    Raises:
        UsageError: Anything else. ``facts["name"]`` is the key, such as ``val/loss``.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"Metrics are a dictionary, and not a {type(metrics).__qualname__}.",
            hint='Such as {"loss": 0.1}.',
        )
    return _plain(metrics, "", 0)


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics with keys such as ``val/loss``.

    Raises:
        UsageError: Two of them have one key.
    """
    found: dict[str, Any] = {}
    _flatten(metrics, "", found)
    return found


def with_found(metrics: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics with what a validation has found put over them.

    Args:
        metrics: As they were reported.
        found: Flat, with keys such as ``val/loss``.
    """
    merged: dict[str, Any] = {}
    rest = dict(found)
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            before = f"{key}/"
            inner = {name: rest.pop(name) for name in found if name.startswith(before)}
            merged[key] = with_found(value, {n[len(before) :]: one for n, one in inner.items()})
        else:
            merged[key] = value
    return {**merged, **rest}


def _plain(metrics: Mapping[str, Any], before: str, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise UsageError(f"The metrics nest deeper than {_MAX_DEPTH} levels.", name=before)
    found: dict[str, Any] = {}
    for key, value in metrics.items():
        if not isinstance(key, str) or not key:
            raise UsageError(
                f"A metric has the key {key!r}, which is no text.", name=before + str(key)
            )
        name = before + key
        if value is None or isinstance(value, str):
            found[key] = None if value is None else str(value)
        elif isinstance(value, Mapping):
            found[key] = _plain(value, f"{name}/", depth + 1)
        else:
            found[key] = _number(name, value)
    return found


def _number(name: str, value: Any) -> int | float | bool:
    number = as_number(name, value)
    for kind in (bool, int, float):  # also of a class of its own, which JSON would not bring back
        if isinstance(number, kind):
            return kind(number)
    return number


def _flatten(metrics: Mapping[str, Any], before: str, found: dict[str, Any]) -> None:
    for key, value in metrics.items():
        name = before + key
        if isinstance(value, Mapping):
            _flatten(value, f"{name}/", found)
        elif name in found:
            raise UsageError(
                f"Two metrics are called {name!r}: one by its key, one by being nested.", name=name
            )
        else:
            found[name] = value
