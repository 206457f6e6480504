"""The public names: each is there, lists agree, and importing them stays light."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

import milepost
from milepost import errors

ROOT = Path(milepost.__file__).parent
REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
PACKAGES = sorted(
    info.name for info in pkgutil.iter_modules([str(ROOT)], "milepost.") if info.ispkg
)
TORCH_FREE = [
    "checkpoint",
    "display",
    "errors",
    "format",
    "launch",
    "naming",
    "opening",
    "progress",
    "reporting",
    "runs",
    "stores",
    "version",
]


@pytest.mark.parametrize("name", milepost.__all__)
def test_every_public_name_resolves(name):
    """A lazy table hides a typo until someone uses the name."""
    assert getattr(milepost, name) is not None
    assert name in dir(milepost)


def test_public_names_are_listed_alike_everywhere():
    """The table serves programs, ``__all__`` readers, the typing block type checkers."""
    source = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == milepost._MODULE_OF_NAME
    assert sorted([*typed, "__version__"]) == sorted(milepost.__all__)


def test_every_error_is_public():
    """People match on classes, so they must be able to name them."""
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert classes <= set(milepost.__all__)


def test_unknown_name_is_an_attribute_error():
    """As of any other module, so that ``hasattr`` works."""
    with pytest.raises(AttributeError, match="'milepost' has no attribute 'Chekpoint'"):
        milepost.Chekpoint  # noqa: B018
    assert not hasattr(milepost, "Chekpoint")


@pytest.mark.parametrize("name", PACKAGES)
def test_names_of_every_package_resolve(name):
    """An ``__all__`` that lists what is not there breaks ``from ... import *``."""
    package = importlib.import_module(name)
    missing = [each for each in getattr(package, "__all__", []) if not hasattr(package, each)]
    assert missing == []


def listed_in(page: str) -> dict[str, list[str]]:
    """Return the names that a reference lists below the heading of each module.

    They stand in the first column of tables, and first in the lines of the tree of errors.
    """
    names: dict[str, list[str]] = {}
    section: list[str] = []
    language = ""
    for line in page.splitlines():
        if line.startswith("```"):
            language = "" if language else line[3:]
        elif language:
            if language == "text":
                section += re.findall(r"^ *(\w+)", line)
        elif line.startswith("## "):
            module = re.fullmatch(r"## (milepost[.\w]*)", line)
            section = [] if module is None else names.setdefault(module[1], [])
        elif line.startswith("| `"):
            section += re.findall(r"`(\w+)`", line.split("|")[1])
    return names


def test_the_reference_is_read_as_it_is_meant():
    """The mechanism itself, on a page whose answer is known."""
    page = """
## milepost
| name | |
|---|---|
| `A`, `B` | like `C` |
```text
D
  E (ValueError)   `F`
```
```python
| `G` | no table
```
## The program
| `H` | of no module |
## milepost.train
| `I` | last |
"""
    assert listed_in(page) == {"milepost": ["A", "B", "D", "E"], "milepost.train": ["I"]}


def test_the_reference_lists_every_public_package():
    """One without a section would be public for nobody."""
    public = {name for name in PACKAGES if hasattr(importlib.import_module(name), "__all__")}
    sections = listed_in(REFERENCE.read_text(encoding="utf-8"))
    assert {"milepost", *public} <= set(sections)


@pytest.mark.parametrize("module", list(listed_in(REFERENCE.read_text(encoding="utf-8"))))
def test_the_reference_lists_what_is_public_and_nothing_else(module):
    """Each name once: who adds one says what it is, and who removes one takes it out here too."""
    listed = Counter(listed_in(REFERENCE.read_text(encoding="utf-8"))[module])
    assert listed == Counter(importlib.import_module(module).__all__)


def loaded_by(statements: str) -> dict[str, object]:
    """Run statements in a fresh interpreter and say what they left behind."""
    program = f"""
import json, signal, sys, threading
before = [signal.getsignal(n) for n in sorted(signal.valid_signals())]
{statements}
after = [signal.getsignal(n) for n in sorted(signal.valid_signals())]
print(json.dumps({{
    "modules": sorted(sys.modules),
    "threads": [thread.name for thread in threading.enumerate()],
    "same_handlers": before == after,
}}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_is_light():
    """Importing the package must cost a script nothing that it does not use."""
    left = loaded_by("import milepost")
    for heavy in ("torch", "numpy", "rich", "typer", "obstore", "crc32c"):
        assert heavy not in left["modules"]
    assert left["threads"] == ["MainThread"]
    assert left["same_handlers"]


def test_torch_free_half_loads_no_torch():
    """Commands about a run start fast only if nothing below them imports torch or numpy."""
    names = []
    for top in TORCH_FREE:
        names.append(f"milepost.{top}")
        folder = ROOT / top
        if folder.is_dir():
            names += [f"milepost.{top}.{i.name}" for i in pkgutil.iter_modules([str(folder)])]
    left = loaded_by("\n".join(f"import {name}" for name in names))
    assert "torch" not in left["modules"]
    assert "numpy" not in left["modules"]
    assert left["threads"] == ["MainThread"]
    assert left["same_handlers"]


def test_reading_names_of_the_torch_free_half_loads_no_torch():
    """Through the lazy table, as users write it."""
    left = loaded_by("import milepost as mp; mp.Time, mp.KeepLast, mp.open_store, mp.open_run")
    assert "torch" not in left["modules"]


def test_training_loads_the_metrics_of_nobody():
    """The library of metrics takes as long to load as torch; most trainings have a loss alone."""
    left = loaded_by("import milepost as mp; mp.Trainer, mp.Evaluator('all', [])")
    assert "torch" in left["modules"]
    assert "torchmetrics" not in left["modules"]


def test_types_are_shipped_and_the_version_is_one():
    """Type checkers look for the marker; the installed metadata must match the code."""
    assert (ROOT / "py.typed").is_file()
    assert metadata.version("milepost") == milepost.__version__
