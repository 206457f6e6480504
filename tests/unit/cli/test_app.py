"""The program as a process: exit codes, streams, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from milepost import errors
from milepost.cli.exits import exit_of

_METADATA_VERBS = """
import contextlib, io, json, sys
from milepost.cli.app import app
codes = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            app(arguments)
        except SystemExit as error:
            codes.append(error.code)
heavy = {"torch", "numpy", "rich"} & set(sys.modules)
print(json.dumps([codes, sorted(heavy)]))
"""


def test_metadata_verbs_import_neither_torch_nor_numpy(run):
    """They are typed all day long and must answer at once."""
    folder = str(run.folder)
    verbs = [
        ["ls", folder, "--all"],
        ["show", folder],
        ["show", folder, "--tensors", "--tree", "--files"],
        ["verify", folder, "--all"],
        ["diff", f"{folder}/ep1", f"{folder}/ep1"],
        ["pin", f"{folder}/ep1"],
        ["unpin", f"{folder}/ep1"],
        ["doctor", folder],
        ["prune", folder, "--keep-last", "1", "--yes"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _METADATA_VERBS, json.dumps(verbs)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [[0] * len(verbs), []]


def start(*arguments):
    command = [sys.executable, "-m", "milepost.cli.app", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_process_ends_with_the_documented_code(run, tmp_path):
    """Data on stdout, the reason on stderr, and a code that scripts can tell apart."""
    fine = start("ls", run.folder, "--json")
    assert (fine.returncode, fine.stderr) == (0, "")
    assert len(json.loads(fine.stdout)) == 3
    missing = start("show", tmp_path / "nothing")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr.startswith("error: ")
    assert "Traceback" not in missing.stderr
    assert start("ls", "--no-such-option").returncode == 2


def test_a_reader_that_leaves_early_is_no_error(run):
    """As in ``milepost show RUN --tensors | head -1``."""
    command = f"{sys.executable} -m milepost.cli.app show {run.folder} --tree --json"
    done = subprocess.run(
        ["/bin/sh", "-c", f"({command}; echo $? >&2) | true"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # 141 is what other programs end with; 0 if all was taken before the reader left.
    assert done.stderr.strip() in ("141", "0")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DamagedError, 1),
        (errors.FormatError, 1),
        (errors.MismatchError, 1),
        (errors.UsageError, 2),
        (errors.DuplicateNameError, 2),
        (errors.ExistsError, 2),
        (errors.UnsupportedStateError, 2),
        (errors.MissingError, 3),
        (errors.AccessError, 4),
        (errors.IncompleteError, 5),
        (errors.StorageError, 6),
        (errors.NoSpaceError, 6),
        (errors.NewerFormatError, 6),
        (errors.DeadlineError, 6),
        (errors.FencedError, 6),
    ],
)
def test_each_kind_of_error_has_its_code(error, code):
    """The codes are documented and never change."""
    assert exit_of(error("what")) == code


def test_an_error_says_what_is_safe_and_what_to_do(milepost, run):
    """Three lines, each with its label."""
    lines = milepost("prune", run.folder, "--keep-last", 1, code=2).stderr.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "safe", "hint"]


def test_help_tells_the_exit_codes(milepost):
    """Nobody should have to read the source for them."""
    text = " ".join(milepost("--help").stdout.split())
    assert "0 fine, 1 damaged or different, 2 wrong usage, 3 not there" in text
