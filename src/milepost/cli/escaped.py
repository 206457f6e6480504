"""Text of others on a terminal: names, metrics and notes may come from anyone."""

from __future__ import annotations

__all__ = ["escaped", "escaped_lines"]


def escaped(text: str) -> str:
    """Return text on one line, in which what a terminal would obey stands as an escape."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def escaped_lines(text: str) -> str:
    """Do the same to each line of a text that has several."""
    return "\n".join(map(escaped, text.split("\n")))
