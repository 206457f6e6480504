"""The program as a process: exit codes, streams, and what it does not import."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from milepost import errors
from milepost.checkpoint import Checkpoint
from milepost.cli.exits import exit_of
from milepost.version import __version__

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


_FAILING = """
import sys
from milepost.cli import app as program
def fail():
    raise ZeroDivisionError("a mistake of ours")
program.app.command("fail")(fail)
program.main()
"""


def test_what_is_wrong_with_the_program_is_not_told_of_a_checkpoint(run):
    """Scripts delete what ends with 1: the checkpoints here are whole."""
    verify = f"{sys.executable} -m milepost.cli.app verify --all {run.folder}"
    full = subprocess.run(
        ["/bin/sh", "-c", f"{verify} > /dev/full"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert full.returncode == 6
    assert full.stderr == "error: The output could not be written: No space left on device.\n"
    both = subprocess.run(["/bin/sh", "-c", f"{verify} > /dev/full 2>&1"], timeout=60, check=False)
    assert both.returncode == 6
    failing = subprocess.run(
        [sys.executable, "-c", _FAILING, "fail"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert failing.returncode == 6
    assert failing.stderr.endswith("ZeroDivisionError: a mistake of ours\n")


def test_a_name_that_the_output_cannot_spell_is_no_failure(make_run):
    """The encoding of a terminal or a log says nothing about a checkpoint."""
    maker = make_run()
    maker.save("ep1", metrics={"caf\u00e9 \udc80": 1.0})
    done = subprocess.run(
        [sys.executable, "-m", "milepost.cli.app", "ls", str(maker.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9 \\udc80=1" in done.stdout


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 2)])
def test_a_question_that_is_not_answered_deletes_nothing(run, key, code):
    """Ctrl-C ends every verb with one code, and no answer is not "damaged"."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "milepost.cli.app", "prune", str(run.folder)]
    with subprocess.Popen(
        [*command, "--keep-last", "1"],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as asking:
        try:
            assert asking.stderr is not None
            seen = b""
            while b"for good?" not in seen:
                more = asking.stderr.read1(4096)
                assert more, seen
                seen += more
            if key == b"\x03":  # the terminal is not that of the new session
                asking.send_signal(signal.SIGINT)
            else:
                os.write(master, key)
            assert asking.wait(timeout=60) == code
        finally:
            asking.kill()
            os.close(slave)
            os.close(master)
    assert {one.name for one in run.folder.iterdir()} >= {"ep1", "ep2", "ep3"}


def test_a_home_of_nobody_and_a_size_beyond_measure_are_wrong_usage(milepost):
    """Both are typed by hand."""
    missing = milepost("ls", "~nobody-of-that-name/x", code=3)
    assert "~nobody-of-that-name/x" in missing.stderr
    milepost("bench", ".", "--size", "9" * 400, code=2)


def test_what_others_have_written_does_not_command_the_terminal(milepost, make_run):
    """A metric or a tensor of a stranger could rename the window, or fake a line of the output."""
    wild = "l\x1b]0;title\x07\nep9\u202e"
    maker = make_run()
    maker.save("ep1", metrics={wild: 1.0}, weights={wild: (1.0,)}, values={wild: 1}, notes=(wild,))
    maker.save("ep2", metrics={wild: 2.0}, weights={wild: (2.0,)}, values={wild: 2})
    Checkpoint(maker.store, "ep1").set_metadata({wild: wild})
    one, two = maker.folder / "ep1", maker.folder / "ep2"
    for verb in (
        ("ls", maker.folder),
        ("show", one),
        ("show", "--tensors", one),
        ("show", "--tree", one),
        ("diff", one, two),
        ("verify", one),
        ("prune", maker.folder, "--keep-best", f"{wild}:min", "--why", "--dry-run"),
        ("show", f"{maker.folder}/{wild}"),
    ):
        code = {"diff": 1}.get(verb[0], 3 if verb[1:] == (f"{maker.folder}/{wild}",) else 0)
        result = milepost(*verb, code=code)
        for text in (result.stdout, result.stderr):
            assert all(one.isprintable() for one in text.replace("\n", "")), verb
            assert "\nep9" not in text, verb


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


def test_the_package_itself_is_the_program_too():
    """Where the folder of scripts is not on the path; and it is as light."""
    program = "import runpy, sys; sys.argv = ['milepost', '--version']\n"
    program += "try: runpy.run_module('milepost', run_name='__main__', alter_sys=True)\n"
    program += "except SystemExit as end: print(end.code, 'torch' in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [f"milepost {__version__}", "0 False"]
