"""What pages list of the package, against the package itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import milepost
import milepost.train
from milepost.launch import RayEngine, launch

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
PACKAGE = Path(milepost.__file__).parent

TABLES = {
    "any-loop.md": ["Checkpointer"],
    "trainer.md": ["Trainer", "Evaluator", "EMA", "EarlyStop"],
    "object-stores.md": ["RunDirectoryUploader"],
    "object-store-services.md": ["ObjectStoreProviderHparams"],
}
"""Whose arguments stand in the tables of a page that begin with ``argument``."""


def tables_of(page: str, head: str) -> list[tuple[str, list[list[str]]]]:
    """Return the tables whose first cell is ``head``, with the text before each."""
    lines, found, before = page.splitlines(), [], ""
    for number, line in enumerate(lines):
        if line.startswith("| ") and "".join(lines[number + 1 : number + 2])[:4] == "|---":
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split(" |")])
            if line.split("|")[1].strip() == head:
                found.append((before, rows))
        elif line and not line.startswith("|"):
            before = line
    return found


def arguments_of(called: Any) -> dict[str, Any]:
    """Return the arguments that have names, with their defaults."""
    return {
        name: one.default
        for name, one in inspect.signature(called).parameters.items()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }


def names_in(cell: str) -> list[str]:
    """Return what stands in code marks, without defaults."""
    return [text.partition("=")[0] for text in re.findall(r"`([^`]+)`", cell)]


def called(name: str) -> Any:
    """Return a public class by its name."""
    return getattr(milepost, name, None) or getattr(milepost.train, name)


@pytest.mark.parametrize("page", TABLES)
def test_tables_list_every_argument(page):
    """An option that a guide does not list exists for nobody; and so it says, all of them."""
    listed: dict[str, dict[str, str | None]] = {name: {} for name in TABLES[page]}
    for before, rows in tables_of((GUIDES / page).read_text(encoding="utf-8"), "argument"):
        named = re.match(r"`(\w+)\(", before)
        owner = listed[named[1] if named else TABLES[page][0]]
        for row in rows:
            default = row[1].strip("`") if len(row) == 3 else None
            owner |= dict.fromkeys(names_in(row[0]), default)
    for name, arguments in listed.items():
        wanted = arguments_of(called(name))
        assert set(arguments) == set(wanted), name
        written = {key: text for key, text in arguments.items() if text is not None}
        for key, text in written.items():
            default = ast.literal_eval(text) if text else inspect.Parameter.empty
            assert default == wanted[key], f"{name}({key}=)"


def test_tables_of_fields_list_every_field():
    """The same for configurations, whose tables begin with their names."""
    for name in ("ValidationConfig", "ValidationTaskConfig"):
        page = (GUIDES / "validation.md").read_text(encoding="utf-8")
        ((_, rows),) = tables_of(page, f"`{name}`")
        listed = [one for row in rows for one in names_in(row[0])]
        assert listed == list(arguments_of(called(name)))


def test_what_guides_import_is_in_the_reference():
    """Or a reader of one page finds a name that no other page knows."""
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in GUIDES.glob("*.md")]
    imported = [
        (found[1], name.strip())
        for page in pages
        for found in re.finditer(r"^from (milepost[.\w]*) import ([\w, ]+)$", page, re.MULTILINE)
        for name in found[2].split(",")
    ]
    assert ("milepost.stores.cloud", "CloudStore") in imported
    missing = {(module, name) for module, name in imported if f"`{name}" not in reference}
    assert missing == set()
    for module, name in imported:
        assert hasattr(importlib.import_module(module), name)


def test_the_tree_in_the_readme_is_the_package_in_its_order():
    """It says that a file may use those above it, and that this is checked."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^  (\w+)(?:\.py|/) ", page.split("src/milepost/\n", 1)[1], re.MULTILINE)
    there = {info.name for info in pkgutil.iter_modules([str(PACKAGE)])}
    assert sorted(listed) == sorted(there - {"__main__"})
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    layer = {
        name.strip(" ()"): number
        for number, line in enumerate(reversed(contract["layers"]))
        for name in line.split("|")
    }
    numbers = [layer[name] for name in listed]
    assert numbers == sorted(numbers), listed


def test_old_names_lead_to_names_that_there_are():
    """A table of names that are wrong themselves sends people from one TypeError to the next."""
    known = ("Trainer", "Checkpointer", "Evaluator", "ScalingConfig")
    owners = [*map(called, known), launch, RayEngine]
    wanted = {name for owner in owners for name in arguments_of(owner)}
    page = (GUIDES / "coming-from.md").read_text(encoding="utf-8")
    heads = ("Composer", "Ray Train", "Lightning", "by hand")
    rows = [row for head in heads for _, found in tables_of(page, head) for row in found]
    named = {name for _, new in rows for name in re.findall(r"\b(\w+)=(?!=)", new)}
    assert named - wanted <= {"model", "loss"}  # what is tracked, and logged, by a name of its own
    ((_, composer),) = tables_of(page, "Composer")
    old = {name for cell, _ in composer for name in re.findall(r"`(\w+)=", cell)}
    assert len(old) > 5
    assert old & set(arguments_of(milepost.Trainer)) == {"device"}  # of which a value differs


@pytest.mark.cloud
def test_the_bucket_on_ones_own_machine_is_one(tmp_path):
    """Its lines as they stand, but for the port and the wait."""
    pytest.importorskip("moto.server")
    if shutil.which("curl") is None:
        pytest.skip("curl is not there")
    page = (GUIDES / "object-store-services.md").read_text(encoding="utf-8")
    block = page.split("## A bucket on your own machine")[1].split("```console\n")[1]
    lines = [line[2:] for line in block.split("```")[0].splitlines()]
    assert len(lines) == 4
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = "\n".join(lines).replace("5057", port)
    script = script.replace("& sleep 5", ">log 2>&1 & server=$!\ntrap 'kill $server' EXIT")
    script = script.replace("curl -X PUT", "curl -sf --retry 50 --retry-connrefused -X PUT")
    put = "import milepost as mp; mp.open_store('s3://runs/a').put('key', b'value')"
    get = "import milepost as mp; print(mp.open_store('s3://runs/a').get('key'))"
    script += f'\n{sys.executable} -c "{put}"\n{sys.executable} -c "{get}"\n'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
    )
    assert done.stdout.endswith("b'value'\n"), done.stdout + done.stderr
