"""The names under which the objects of a training are stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ..errors import DuplicateNameError

__all__ = ["name_all"]

T = TypeVar("T")


def name_all(objects: Iterable[T], *, kind: str) -> dict[str, T]:
    """Give every object a name that no other has.

    An object's own ``name`` wins. Others are called after their class, without the function it
    was defined in; the second of a class gets ``-2``, and so on in the order given.

    Args:
        objects: The objects, in the order the user gave them.
        kind: What they are, for the message: ``"callback"``.

    Returns:
        Name -> object, in the order given.

    Raises:
        DuplicateNameError: Two objects carry one name of their own.
    """
    given = list(objects)
    chosen: set[str] = set()
    for one in given:
        own = _own_name(one)
        if own is None:
            continue
        if own in chosen:
            raise DuplicateNameError(
                f"Two objects given as {kind} are named {own!r}.",
                hint="Names are the keys of their state in a checkpoint: give each its own.",
                name=own,
            )
        chosen.add(own)
    named: dict[str, T] = {}
    for one in given:
        name = _own_name(one)
        if name is None:
            base = type(one).__qualname__.rpartition("<locals>.")[2]
            name, number = base, 1
            while name in chosen:
                number += 1
                name = f"{base}-{number}"
            chosen.add(name)
        named[name] = one
    return named


def _own_name(one: object) -> str | None:
    name = getattr(one, "name", None)
    return name if isinstance(name, str) else None
