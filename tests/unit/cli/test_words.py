"""What the program says is in the words of the command line."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer

import milepost as package
from milepost import errors
from milepost.cli.app import app
from milepost.cli.words import in_options, options_of

SOURCE = Path(package.__file__).parent
VERBS = typer.main.get_command(app).commands

REACHED = (
    "checkpoint.py",
    "consolidating.py",
    "convert",
    "copies",
    "display.py",
    "format",
    "frames",
    "importing.py",
    "integrations/dcp/export.py",
    "launch/config.py",
    "launch/policy.py",
    "publisher.py",
    "runs",
    "stores",
    "transfers",
)
"""Files whose errors the verbs let through."""

OF_PYTHON = {
    "num_workers": "the verb checks --workers itself",
    "record_origin": "of code that publishes by itself",
    "local_cache": "no verb takes one",
    "silent_timeout_s": "an option of addresses",
    "slowest_bytes_s": "an option of addresses",
}


def told(text):
    """Return the spellings of Python in a text: ``name=value``, and names with underscores."""
    return re.findall(r"(?<![\w?&/-])([a-z_]+)=[\w\"'(]", text) + re.findall(
        r"(?<![\w./{\"'-])([a-z]+(?:_[a-z]+)+)(?![\w.(/}\"'])", text
    )


def hints():
    """Yield the literal texts of hints that the verbs may show, with their places."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not any(name == one or name.startswith(f"{one}/") for one in REACHED):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for keyword in getattr(node, "keywords", ()):
                if keyword.arg in ("hint", "safe"):
                    parts = ast.walk(keyword.value)
                    text = "".join(
                        part.value
                        for part in parts
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    )
                    yield f"{name}:{node.lineno}", text


def test_no_hint_that_a_verb_shows_is_in_the_words_of_python():
    """Somebody who typed a verb cannot write ``trust=True``."""
    options = {
        name: spelled for verb in VERBS.values() for name, spelled in options_of(verb).items()
    }
    assert options["max_failures"] == "--max-failures"
    found = dict(hints())
    assert any("trust=True" in text for text in found.values())
    left = {place: told(in_options(text, options)) for place, text in found.items()}
    left = {place: [one for one in words if one not in OF_PYTHON] for place, words in left.items()}
    assert {place: words for place, words in left.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Load it with trust=True only if", "Load it with --trust only if"),
        ("Use max_failures=-1 for any", "Use --max-failures -1 for any"),
        ("new attempts with max_failures.", "new attempts with --max-failures."),
        ('Give storage_path="runs/a b".', 'Give --storage-path "runs/a b".'),
        ("distrust=True and my_max_failures_s", "distrust=True and my_max_failures_s"),
    ],
)
def test_options_are_spelled_as_they_are_typed(text, expected):
    """The rule reads whole words only."""
    options = {**options_of(VERBS["run"]), **options_of(VERBS["import"])}
    assert in_options(text, options) == expected


def test_what_is_in_the_way_of_a_verb_is_told_with_its_option(milepost, tmp_path):
    """As people meet it: a file with code, a target that is there, a run that is not new."""
    import torch

    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "plain.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    refused = milepost("import", tmp_path / "whole.pt", tmp_path / "run", code=2).stderr
    assert "with --trust only" in refused
    milepost("import", tmp_path / "plain.pt", tmp_path / "new")
    again = milepost("import", tmp_path / "plain.pt", tmp_path / "new", code=2).stderr
    assert "hint: Choose another folder" in again
    target = tmp_path / "out.safetensors"
    verb = ("export", tmp_path / "plain.pt", target, "--to", "safetensors")
    milepost(*verb)
    assert "replace it with --overwrite." in milepost(*verb, code=2).stderr
    milepost(*verb, "--overwrite")


def test_a_file_of_another_tool_is_not_asked_for_again(milepost, tmp_path):
    """Whoever gives a .pt file must not be told to give a .pt file, but what takes it."""
    (tmp_path / "bare.pt").write_bytes(b"of another tool")
    told = milepost("show", tmp_path / "bare.pt", code=3).stderr
    assert "bare.pt is a file that is no checkpoint of Milepost" in told
    assert "milepost import" in told
    assert "Give" not in told


def test_run_names_its_own_options(milepost, tmp_path, monkeypatch):
    """A failure says which option allows another attempt; numbers of workers are its own words."""

    def fail(*_, **__):
        raise errors.LaunchFailedError(
            "It failed, and max_failures is 0.", hint="Allow new attempts with max_failures."
        )

    monkeypatch.setattr(importlib.import_module("milepost.launch"), "launch", fail)
    (tmp_path / "train.py").write_text("")
    told = milepost("run", tmp_path / "train.py", code=1).stderr
    assert "with --max-failures." in told
    assert "max_failures" not in told
    for workers in ("2:1", "0", "1:2:3", "a", ":"):
        told = milepost("run", "-n", workers, tmp_path / "train.py", code=2).stderr
        assert f"--workers {workers} is no number of workers" in told


def test_a_run_below_is_found_and_the_command_given(milepost, make_run, tmp_path, monkeypatch):
    """The Trainer's run lies in ``rank_0/checkpoints`` of the folder that people remember."""
    make_run("runs/digits/rank_0/checkpoints").save("ep1")
    inner = tmp_path / "runs/digits/rank_0/checkpoints"
    outer = tmp_path / "runs" / "digits"
    told = milepost("ls", "--all", f"{outer}/", code=3).stderr
    assert f"There is a run below it: {inner}." in told
    assert f"try: milepost ls --all {inner}" in told
    assert f"try: milepost show {inner}" in milepost("show", outer, code=3).stderr
    monkeypatch.chdir(tmp_path)
    typed = "try: milepost ls runs/digits/rank_0/checkpoints\n"
    assert typed in milepost("ls", code=3).stderr
    assert typed in milepost("ls", "runs", code=3).stderr
    # Of several there is no one command.
    make_run("runs/more").save("ep1")
    told = milepost("ls", "runs", code=3).stderr
    assert "There are runs below it: more, digits/rank_0/checkpoints." in told
    assert "try:" not in told
    told = milepost("ls", inner / "ep1", code=3).stderr
    assert f"That is one checkpoint. See it with: milepost show {inner}/ep1" in told


def test_the_list_of_verbs_is_not_cut(milepost):
    """A text that ends in dots says nothing."""
    assert "..." not in milepost("--help").stdout.replace("[ARGS]...", "")
