"""Errors in the words of the command line.

The library says what to do next as it is written in Python: ``trust=True``. To somebody who typed a
verb that is ``--trust``. Options of a verb bear the names of the parameters they stand for, so one
rule does for all of them, and no verb has a list of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError

__all__ = ["command_for", "in_options", "options_of"]

_PLAIN = re.compile(r"--[a-z]")


def options_of(command: Any) -> dict[str, str]:
    """Return the options of a verb by the names of their parameters: ``max_failures``.

    Args:
        command: The verb, as typer makes it.
    """
    found = {}
    for parameter in command.params:
        spelled = [one for one in parameter.opts if _PLAIN.match(one)]
        if spelled and parameter.name:
            found[str(parameter.name)] = max(spelled, key=len)
    return found


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Return a text with what is an option of the verb spelled as one.

    Args:
        text: What the library says.
        options: The options of the verb; see :func:`options_of`.
    """
    for name, option in options.items():
        text = re.sub(rf"(?<![\w-]){name}=True\b", option, text)
        text = re.sub(rf"(?<![\w-]){name}=(\"[^\"]*\"|'[^']*'|[\w:-]+)", rf"{option} \1", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w-]){name}(?!\w)", option, text)
    return text


def command_for(error: CheckpointError, typed: Sequence[str]) -> str:
    """Return what to type to have what was meant, or nothing if that is not certain.

    Args:
        error: What came of the command.
        typed: The verb and what followed it.
    """
    below = list(error.facts.get("below", []))
    path = str(error.facts.get("path", "")).removeprefix("file://").rstrip("/")
    if len(below) != 1 or not typed:
        return ""
    matching = [n for n, word in enumerate(typed) if n and _names(word, path)]
    words = list(typed)
    if len(matching) == 1:
        place = words[matching[0]].rstrip("/")
        words[matching[0]] = below[0] if place in ("", ".") else f"{place}/{below[0]}"
    elif typed == ["ls"]:  # of the working directory
        words.append(below[0])
    else:
        return ""
    return shlex.join(["milepost", *words])


def _names(word: str, path: str) -> bool:
    from .places import target_of

    if word.startswith("-"):
        return False
    return str(target_of(word)).rstrip("/") == path
