"""What workers run: a function that they can import, or a script.

A function travels as ``module:name`` and its config as JSON, so that nothing has to be pickled:
the worker imports the module again. What that cannot hold is refused before anything is started.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingError, UsageError
from ..processes.functions import check_json, find_function, reference_of

__all__ = ["Entry", "call", "check_json", "find_function", "function_entry", "script_entry"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What each worker runs.

    Attributes:
        arguments: Arguments of ``python -m milepost.launch.worker``.
        label: What it is called in messages.
        config: The config of a function, as JSON.
        sys_path: Where a function's module is looked for.
    """

    arguments: tuple[str, ...]
    label: str
    config: Any = None
    sys_path: tuple[str, ...] = ()


def script_entry(script: str | os.PathLike[str], arguments: Sequence[str]) -> Entry:
    """Return the entry of a script, run as ``python script arguments`` would.

    Raises:
        MissingError: There is no such file.
    """
    path = os.fspath(script)
    if not Path(path).is_file():
        raise MissingError(
            f"There is no script {path}.",
            hint="Give the path of a Python file; its arguments come after it.",
            path=path,
        )
    return Entry(("--script", path, *map(str, arguments)), Path(path).name)


def function_entry(function: Callable[..., Any], config: Any) -> Entry:
    """Return the entry of a function.

    Raises:
        UsageError: It cannot be imported by another process, or does not take the config.
        UnsupportedStateError: JSON cannot hold the config.
    """
    check_json(config, "config")
    _check_takes(function, config)
    reference, path = reference_of(function)
    return Entry((reference,), reference, config, path)


def _check_takes(function: Callable[..., Any], config: Any) -> None:
    signature = inspect.signature(function)
    given = () if config is None and not _wants_config(signature) else (config,)
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UsageError(
            f"{function!r} cannot be called with {'the config' if given else 'no argument'}: "
            f"{error}.",
            hint="The function takes the config, a dictionary, or nothing if there is none.",
        ) from error


def _wants_config(signature: inspect.Signature) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        one.kind in kinds and one.default is inspect.Parameter.empty
        for one in signature.parameters.values()
    )


def call(function: Callable[..., Any], config: Any) -> Any:
    """Call the function with the config, or with nothing if it takes nothing."""
    if config is None and not _wants_config(inspect.signature(function)):
        return function()
    return function(config)
