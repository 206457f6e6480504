"""A process that uploads files for another one, and dies with it.

It is started as a program of its own, so the user's script is not run again. It is told on its
standard input, in lines of JSON, where to upload to and then which files; it answers with a line
for each piece that is on its way and one for each end. Secrets come from the environment, which it
has from its parent. When the input ends, the parent is gone or done, and so is this process.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ..errors import DeadlineError, StorageError
from ..processes.ends import exit_text
from ..processes.parent import end_with_parent
from .destination import Destination, open_recipe
from .transfer import Progress, error_from_record, error_record, send_file

__all__ = ["UploadProcess", "main"]

_SILENCE_S = 600.0
"""How long no piece may get on its way: longer than a store tries one again."""
_END_S = 10.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PACKAGES = str(Path(__file__).parents[2])


@final
class UploadProcess:
    """Such a process, as its parent sees it. One thread starts it, uses it and closes it.

    Args:
        destination: Where it uploads to.
    """

    def __init__(self, destination: Destination) -> None:
        recipe = destination.recipe()
        path = os.pathsep.join(filter(None, (_PACKAGES, os.environ.get("PYTHONPATH"))))
        # Blocked until it ignores them: a signal to the whole group may come while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._unread = b""
        self._say(recipe)

    def send(self, key: str, path: str, *, progress: Progress) -> None:
        """Upload a file. See :func:`send_file`.

        Raises:
            StorageError: It could not be uploaded, or the process has ended.
            DeadlineError: Nothing was heard of it for a long time.
        """
        self._say(json.dumps({"key": key, "path": path}))
        while True:
            answer = self._hear(key)
            if "sent_bytes" in answer:
                progress(answer["sent_bytes"])
            elif "error" in answer:
                raise error_from_record(answer["error"])
            else:
                return

    def kill(self) -> None:
        """End it at once; from any thread."""
        self._process.kill()

    def close(self) -> None:
        """End it when it has done what it was told; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._process.stdout.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _hear(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], _SILENCE_S)[0]:
                self._process.kill()
                raise DeadlineError(
                    f"The upload of {key} did not get on for {_SILENCE_S:g} s.",
                    safe="The file is safe on this machine.",
                    path=key,
                )
            data = os.read(fd, 65536)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> StorageError:
        try:
            code: int | None = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        return StorageError(
            f"A process that uploads {exit_text(code)}.",
            safe="The file is safe on this machine.",
            operation="upload",
        )


def main() -> None:
    """Upload what the parent asks for."""
    # Whoever ends the whole group of processes ends the parent, which lets uploads finish.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    end_with_parent(int(sys.argv[1]))
    # Answers have the output to themselves: what a library prints goes to the errors.
    answers = os.dup(1)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    recipe = json.loads(lines.get())
    store = None

    def answer(**fields: Any) -> None:
        os.write(answers, json.dumps(fields).encode() + b"\n")

    while True:
        asked = json.loads(lines.get())
        try:
            if store is None:
                store = open_recipe(recipe)
            send_file(
                store,
                asked["key"],
                asked["path"],
                progress=lambda num_bytes: answer(sent_bytes=num_bytes),
            )
        except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
            answer(error=error_record(error))
        else:
            answer(done=asked["key"])


def _listen(lines: queue.SimpleQueue[bytes]) -> None:
    """Hand on what the parent says; leave at once when it says nothing any more."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
