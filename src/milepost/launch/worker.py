"""One worker: ``python -m milepost.launch.worker`` runs a function or a script as a rank.

    python -m milepost.launch.worker module:function
    python -m milepost.launch.worker --script train.py arguments ...

Around the user's code it does six things: it dies with its launcher, prints the stack of all
threads on SIGUSR2 and on a crash, writes down what was raised, tells the launcher of it (since a
process that has failed may still hang on its way out), leaves the run that was reported to, and
writes the result of rank 0.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UsageError
from ..liveness import flush_beat
from ..processes.parent import end_with_parent
from .entry import call, check_json, find_function
from .failures import PREEMPTED_CODES, own_frames, write_failure

__all__ = ["main"]

_PID = os.getpid()


class _FinalError(Exception):
    """Carries an error that another attempt would meet again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def main(arguments: list[str]) -> None:
    """Run what the arguments name; end the process with 1 if it raises."""
    end_with_parent(int(os.environ["MILEPOST_LAUNCHER_PID"]))
    # What this process starts inherits the environment, and must not report in its name.
    os.environ["MILEPOST_REPORTS_PID"] = str(_PID)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, all_threads=True)
    if arguments[0] == "--script":
        _guarded(lambda: _run_script(arguments[1], arguments[2:]))
    else:
        _guarded(lambda: _run_function(arguments[0]))


def _guarded(run: Callable[[], None]) -> None:
    try:
        _run_and_leave(run)
    except _FinalError as final:
        _tell(1, final.error, is_final=True)
        _leave_after_failure()
        _end_with(final.error)
    except SystemExit as error:
        if error.code in PREEMPTED_CODES:
            _tell(int(error.code), None)
        elif error.code not in (None, 0):
            _tell(1, error)
        _leave_after_failure()
        raise
    except Exception as error:  # noqa: BLE001 - written down, printed, and ends the process
        _tell(1, error)
        _leave_after_failure()
        _end_with(error)
    finally:
        flush_beat()


def _run_and_leave(run: Callable[[], None]) -> None:
    try:
        run()
    except SystemExit as error:
        if error.code in (None, 0):
            _leave_reports()
        raise
    _leave_reports()


def _leave_reports(value: Any = None, *, is_well: bool = True) -> None:
    """Leave the run that the user's code reported to, if it did."""
    used = sys.modules.get("milepost.reporting.current")
    if used is not None and os.getpid() == _PID:
        used.close_current(is_well=is_well, value=value)


def _leave_after_failure() -> None:
    try:
        _leave_reports(is_well=False)
    except Exception as error:  # noqa: BLE001 - told beside the error that matters
        sys.stderr.write(f"milepost: while leaving the run: {error}\n")


def _end_with(error: Exception) -> NoReturn:
    """Print an error as the interpreter would, without our own frames, and end with 1."""
    trace = own_frames(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1)


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(path).resolve().parent)  # as "python path" does
    runpy.run_path(path, run_name="__main__")


def _run_function(reference: str) -> None:
    folder = Path(os.environ["MILEPOST_LAUNCH_DIR"])
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sys.path[:] = given["sys_path"]
    try:
        function = find_function(reference)
    except (ImportError, UsageError) as error:
        raise _FinalError(error) from error
    result = call(function, given["config"])
    if os.environ["RANK"] != "0":
        _leave_reports()
        return
    try:
        check_json(result, "the return value")
    except TypeError as error:
        raise _FinalError(error) from error
    _leave_reports(result)
    attempt = folder / f"attempt-{os.environ['MILEPOST_ATTEMPT']}"
    (attempt / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _tell(code: int, error: BaseException | None, *, is_final: bool = False) -> None:
    """Let the launcher know at once that this worker is on its way out, and why."""
    if os.getpid() != _PID:
        return  # a forked child is none of the launcher's workers
    rank = int(os.environ["RANK"])
    folder = Path(os.environ["MILEPOST_LAUNCH_DIR"], f"attempt-{os.environ['MILEPOST_ATTEMPT']}")
    if error is not None:
        write_failure(folder / f"rank-{rank}.error.json", error, rank=rank, is_final=is_final)
    os.write(int(os.environ["MILEPOST_TELL_FD"]), f"{rank} {code}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
