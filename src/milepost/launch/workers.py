"""The processes of one attempt: started, watched, asked to end, killed.

Each worker leads a session and process group of its own, so that what it has started (loader
workers, compilers) goes with it. Its end is waited for by a thread that leaves the zombie in place:
as long as that is there the number of the group cannot be given to strangers, and killing the group
is safe.

What has left a worker's group by ``setsid`` is found by a mark in the environment that it got from
the worker, and killed when the attempt ends.

Requests to end go to the worker alone, since a signal to its group would end its loader workers
before it could save. SIGKILL goes to the whole group.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import DeadlineError, storage_error
from ..processes.keeper import MARK, kill_marked
from ..processes.keeping import Keeper
from .engine import Ended, Events, Plan, Told
from .output import Output

__all__ = ["Workers"]

_JOIN_S = 5.0
_REAP_S = 30.0


class Workers:
    """The workers of one attempt on this machine.

    Args:
        plan: The attempt.
        environments: The environment of each, by rank.
        folder: Where logs go: ``rank-0.log`` and so on.
        events: Where ``Ended`` and ``Told`` are put.
        keeper: Kills them if this process dies.
        working_folder: Where they run; ``None``: where this process does.
        shown_rank: The rank whose output is shown as well.
        on_close: Called once none is left.
    """

    def __init__(
        self,
        plan: Plan,
        environments: Mapping[int, Mapping[str, str]],
        *,
        folder: Path,
        events: Events,
        keeper: Keeper,
        working_folder: str | None = None,
        shown_rank: int | None = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._command = [sys.executable, "-u", "-m", "milepost.launch.worker", *plan.arguments]
        self._environments = environments
        self._attempt = plan.number
        self._folder = folder
        self._events = events
        self._keeper = keeper
        self._working_folder = working_folder
        self._shown_rank = shown_rank
        self._on_close = on_close
        self._mark = secrets.token_hex(16)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._outputs: list[Output] = []
        self._tell_fds: tuple[int, int] = (-1, -1)
        self.running: set[int] = set()
        """Ranks whose end has not been taken from the events yet."""

    def start(self) -> None:
        """Start them all. If it raises, none is left.

        Raises:
            CheckpointError: A log cannot be opened, or a process not be started.
        """
        self._tell_fds = os.pipe()
        self._watch(self._hear, "milepost-launch-hear")
        self._keeper.mark(self._mark)
        try:
            for rank in self._environments:
                self._start(rank)
        except BaseException:
            self.close()
            raise

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return self._processes[rank].pid

    def signal(self, number: int, *, but: int | None = None) -> None:
        """Send a signal to every worker that runs, and to nothing that it has started.

        Args:
            number: The signal.
            but: The rank that does not get it.
        """
        for rank in sorted(self.running - {but}):
            # Not reaped before close(), so the number is still its own.
            os.kill(self._processes[rank].pid, number)

    def kill(self) -> None:
        """Kill every worker and all that it has started."""
        for process in self._processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # Nothing but a zombie is left of it; some systems say so in the second way.
                continue

    def close(self) -> None:
        """Kill what is left, and clear up after it. Must be called once they were started.

        Raises:
            DeadlineError: A worker does not even end on SIGKILL.
        """
        self.kill()
        if self._tell_fds[1] >= 0:
            os.write(self._tell_fds[1], b"end\n")
        for thread in self._threads:
            # Before the zombies are reaped: a thread that waits for one must not find it gone.
            thread.join(_JOIN_S)
        stuck = [rank for rank in self._processes if not self._reap(rank)]
        kill_marked(self._mark)
        self._keeper.unmark(self._mark)
        for output in self._outputs:
            output.close()
        if self._tell_fds[1] >= 0:
            for fd in self._tell_fds:
                os.close(fd)
            self._tell_fds = (-1, -1)
        if self._on_close is not None:
            self._on_close()
        if stuck:
            pids = ", ".join(str(self._processes[rank].pid) for rank in stuck)
            raise DeadlineError(
                f"Worker {pids} has not ended within {_REAP_S:g} s after SIGKILL.",
                safe="No other worker was started; acknowledged checkpoints are whole.",
                hint="It hangs in the kernel, most often on a disk or network that does not "
                "answer. Look at its state with ps.",
                pids=pids,
            )
        self._processes.clear()

    def _reap(self, rank: int) -> bool:
        process = self._processes[rank]
        self._keeper.remove(process.pid)
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start(self, rank: int) -> None:
        output = Output(self._folder / f"rank-{rank}.log", is_shown=rank == self._shown_rank)
        self._outputs.append(output)
        tell_fd = self._tell_fds[1]
        own = {"MILEPOST_TELL_FD": str(tell_fd), MARK: self._mark}
        try:
            process = subprocess.Popen(  # noqa: S603 - what the user asked for
                self._command,
                env={**self._environments[rank], **own},
                cwd=self._working_folder,
                stdin=subprocess.DEVNULL,
                stdout=output.fd,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(tell_fd,),
            )
        except OSError as error:
            raise storage_error(error, operation="start", path=self._command[0]) from error
        self._processes[rank] = process
        self.running.add(rank)
        self._keeper.add(process.pid)
        output.started()
        self._watch(lambda: self._wait(rank, process.pid), f"milepost-launch-rank-{rank}")

    def _watch(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, rank: int, pid: int) -> None:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            found = None  # somebody else in this program has reaped it
        if found is None:
            code = None
        elif found.si_code == os.CLD_EXITED:
            code = found.si_status
        else:
            code = -found.si_status
        self._events.put(Ended(self._attempt, rank, code))

    def _hear(self) -> None:
        pending = b""
        while True:
            pending += os.read(self._tell_fds[0], 4096)
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line == b"end":
                    return
                rank, code = line.split()
                self._events.put(Told(self._attempt, int(rank), int(code)))
