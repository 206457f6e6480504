"""Sizes as people write them."""

from __future__ import annotations

import math
import re

import typer

__all__ = ["parse_size"]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST_BYTES = 2**60


def parse_size(text: str) -> int:
    """Return a number of bytes; ``K``, ``M``, ``G`` and ``T`` are powers of 1024.

    Raises:
        typer.BadParameter: It is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    size = math.inf
    if found is not None:
        size = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")
    if not size <= _LARGEST_BYTES:
        raise typer.BadParameter(f"{text[:80]!r} is not a size, such as 512MiB or 4G.")
    return int(size)
