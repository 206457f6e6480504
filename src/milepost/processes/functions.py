"""Functions that another process runs: named, imported again, and called with what JSON can hold.

A function travels as ``module:name`` together with the folders that modules are looked for in, so
that nothing has to be pickled. What cannot travel that way is refused before anything is started.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UnsupportedStateError, UsageError

__all__ = ["check_json", "find_function", "reference_of", "refuse_while_imported"]

_being_imported: list[str] = []


def reference_of(function: Callable[..., Any]) -> tuple[str, tuple[str, ...]]:
    """Return how another process imports a function: ``module:name``, and its search path.

    Raises:
        UsageError: It cannot be imported by another process.
    """
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
    return f"{module}:{name}", tuple(path)


def find_function(reference: str) -> Callable[..., Any]:
    """Import the function named ``module:name``; in a worker.

    Raises:
        UsageError: The module has no such function.
    """
    module, _, name = reference.partition(":")
    _being_imported.append(module)
    try:
        found = getattr(importlib.import_module(module), name, None)
    finally:
        _being_imported.pop()
    if not callable(found):
        raise UsageError(
            f"The module {module} has no function {name} in a worker.",
            hint="It must be there whenever the module is imported, not only in the main program.",
        )
    return found  # type: ignore[no-any-return]


def refuse_while_imported(what: str) -> None:
    """Refuse what a script does when it is only imported for one of its functions.

    A script that trains, and names a function of its own for another process, is imported there.
    Were it to train there as well, it would take the run away from the process that is meant to.

    Args:
        what: What is refused, such as ``"opened a run"``.

    Raises:
        UsageError: A function is being looked for in a module that does this.
    """
    if _being_imported:
        raise UsageError(
            f"{_being_imported[-1]} {what} while it was imported for one of its functions.",
            safe="Nothing was touched.",
            hint='Put what only the main program is to do under if __name__ == "__main__".',
            module=_being_imported[-1],
        )


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
