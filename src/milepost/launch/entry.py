"""What workers run: a function that they can import, or a script.

A function travels as ``module:name`` and its config as JSON, so that nothing has to be pickled:
the worker imports the module again. What that cannot hold is refused before anything is started.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingError, UnsupportedStateError, UsageError

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
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "") or ""
    path = [str(Path(part or ".").absolute()) for part in sys.path]
    if module == "__main__":
        module, folder = _name_of_main(function)
        path = [folder, *path] if folder else path
    elif not _is_found(module, name, function):
        raise _not_importable(function)
    if not name.isidentifier():
        raise _not_importable(function)
    return Entry((f"{module}:{name}",), f"{module}:{name}", config, tuple(path))


def check_json(value: Any, where: str) -> None:
    """Require that a value comes back from JSON as it is.

    Args:
        value: The value.
        where: What it is called in the message.

    Raises:
        UnsupportedStateError: It, or something in it, would not. ``facts["path"]`` leads there.
    """
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for number, item in enumerate(value):
            check_json(item, f"{where}[{number}]")
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _not_json(key, f"the key {key!r} of {where}")
            check_json(item, f"{where}[{key!r}]")
        return
    raise _not_json(value, where)


def _not_json(value: Any, where: str) -> UnsupportedStateError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UnsupportedStateError(
        f"JSON cannot hold {where}: it is a {kind}.",
        hint="Use dictionaries with text as keys, lists, text, int, float, bool and None; "
        "a number of NumPy or torch has .item(), a tuple becomes a list.",
        path=where,
        found=kind,
    )


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


def _is_found(module: str, name: str, function: Callable[..., Any]) -> bool:
    return getattr(sys.modules.get(module), name, None) is function


def _name_of_main(function: Callable[..., Any]) -> tuple[str, str]:
    """Return how a worker imports the main program, and the folder to look in."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "builtins"):
        return spec.name, ""  # python -m package.train
    file = getattr(main, "__file__", None)
    path = Path(file).absolute() if file else Path()
    if not path.is_file() or path.suffix != ".py" or not path.stem.isidentifier():
        raise _not_importable(function)
    if path.stem in sys.builtin_module_names:
        raise _not_importable(function)
    return path.stem, str(path.parent)


def _not_importable(function: Callable[..., Any]) -> UsageError:
    return UsageError(
        f"Workers cannot import {function!r}.",
        hint="Define it with def at the top level of a file, not in another function, a class, a "
        "notebook or as a lambda. The file's name must be one that import takes.",
    )


def find_function(reference: str) -> Callable[..., Any]:
    """Import the function named ``module:name``; in a worker.

    Raises:
        UsageError: The module has no such function.
    """
    module, _, name = reference.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise UsageError(
            f"The module {module} has no function {name} in a worker.",
            hint="It must be there whenever the module is imported, not only in the main program.",
        )
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], config: Any) -> Any:
    """Call the function with the config, or with nothing if it takes nothing."""
    if config is None and not _wants_config(inspect.signature(function)):
        return function()
    return function(config)
