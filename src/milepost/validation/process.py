"""The process of one validation: started, asked to end, killed, and what it has answered.

It leads a session and process group of its own, so that what it has started goes with it. Its end
is waited for by a thread that leaves the zombie in place: as long as that is there the number of
the group cannot be given to strangers, and killing the group is safe.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeadlineError, FormatError, storage_error
from ..format import canonical, tree
from ..processes.ends import exit_text, log_tail
from ..processes.keeping import Keeper
from .worker import ANSWER, MAX_ANSWER_BYTES, TASK

__all__ = ["Answer", "ValidationProcess"]

_REAP_S = 30.0
_TAIL_LINES = 30
# Of a rank: a validation is none, whoever supervises it.
_OF_RANKS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "MILEPOST_ATTEMPT", "MILEPOST_LAUNCH_DIR"),
        *("MILEPOST_LAUNCHER_PID", "MILEPOST_TELL_FD"),
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has answered.

    Attributes:
        metrics: What it has found; ``None`` if it raised.
        error: The traceback if it did.
    """

    metrics: Mapping[str, Any] | None
    error: str = ""


class ValidationProcess:
    """One process.

    Args:
        task: What it reads, see ``worker.py``.
        keeper: Kills it if this process dies.
        on_end: Called in another thread when it has ended.
    """

    def __init__(
        self, task: Mapping[str, Any], *, keeper: Keeper, on_end: Callable[[], None]
    ) -> None:
        self._keeper = keeper
        self._on_end = on_end
        self._code: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="milepost-validation-"))
        try:
            whole = {**task, "parent_pid": os.getpid()}
            (self._folder / TASK).write_text(json.dumps(whole), encoding="ascii")
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - what the user asked for
                    [sys.executable, "-u", "-m", "milepost.validation.worker", str(self._folder)],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise storage_error(error, operation="start", path=sys.executable) from error
        keeper.add(self._process.pid)
        self._thread = threading.Thread(
            target=self._wait, name="milepost-validation-wait", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return its number."""
        return self._process.pid

    @property
    def end_text(self) -> str:
        """Return how it ended, in words, and the last lines of what it wrote."""
        tail = log_tail(self._folder / "log", num_lines=_TAIL_LINES)
        text = f"The process {exit_text(self._code)}."
        return f"{text} The last it wrote:\n{tail}" if tail else text

    def answer(self) -> Answer | None:
        """Return what it has answered, or ``None``."""
        path = self._folder / ANSWER
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            fields = canonical.load(data, where=str(path), max_bytes=2 * MAX_ANSWER_BYTES)
            if "error" in fields:
                return Answer(None, str(fields["error"]))
            return Answer(dict(tree.decode(fields["metrics"])))
        except (FormatError, KeyError, TypeError, ValueError) as error:
            return Answer(None, f"The answer cannot be read: {error}")

    def ask_to_end(self) -> None:
        """Send SIGTERM to it, and to nothing that it has started."""
        try:
            os.kill(self.pid, signal.SIGTERM)  # not reaped by us yet, so the number is its own
        except ProcessLookupError:
            return  # somebody else in this program has reaped it

    def kill(self) -> None:
        """Kill it and all that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return  # nothing but a zombie is left of it; some systems say so in the second way

    def close(self) -> None:
        """Kill what is left, and clear up after it.

        Raises:
            DeadlineError: It does not even end on SIGKILL.
        """
        self.kill()
        # Before it is reaped: a thread that waits for it must not find it gone.
        self._thread.join(_REAP_S)
        self._keeper.remove(self.pid)
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"The validation process {self.pid} has not ended within {_REAP_S:g} s after "
                "SIGKILL.",
                hint="It hangs in the kernel, most often on a disk that does not answer.",
                pid=self.pid,
            ) from error
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            found = None  # somebody else in this program has reaped it
        if found is not None:
            is_exit = found.si_code == os.CLD_EXITED
            self._code = found.si_status if is_exit else -found.si_status
        self._on_end()


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }
