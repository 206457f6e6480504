"""The launcher's end of the pipe to its keeper; see ``keeper.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["Keeper"]

_REAP_S = 30.0
_KEEPER = Path(__file__).with_name("keeper.py")


class Keeper:
    """The process that kills the workers if this one dies.

    It is started again if it was killed itself.

    Args:
        is_apart: Whether it is no child of this process: there are programs that kill all children
            of a process that ends, and would leave nobody to kill what those have started.
    """

    def __init__(self, *, is_apart: bool = False) -> None:
        self._options = ["--apart"] if is_apart else []
        self._listed: set[str] = set()
        self._folders: set[str] = set()
        self._process = self._start()

    def add(self, group: int) -> None:
        """Kill this process group when the launcher dies."""
        self._list("+", str(group))

    def remove(self, group: int) -> None:
        """Forget a group. Call it while its number cannot have been given to another one."""
        self._forget("-", str(group))

    def mark(self, mark: str) -> None:
        """Kill what carries this mark when the launcher dies."""
        self._list("*", mark)

    def unmark(self, mark: str) -> None:
        """Forget a mark."""
        self._forget("/", mark)

    def sweep(self, folder: Path) -> None:
        """Remove this temporary folder when the launcher dies or is done with the keeper."""
        self._folders.add(f"={folder}")
        self._say(f"={folder}\n")

    def close(self) -> None:
        """End the keeper. No worker may be left. Closing twice is no error."""
        assert not self._listed
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # a forked child of ours may still hold the pipe
        self._process.wait(_REAP_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - a file of ours
            [sys.executable, "-I", "-S", str(_KEEPER), *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def _list(self, kind: str, word: str) -> None:
        self._listed.add(kind + word)
        self._say(f"{kind}{word}\n")

    def _forget(self, kind: str, word: str) -> None:
        self._listed.discard({"-": "+", "/": "*"}[kind] + word)
        self._say(f"{kind}{word}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            self._process.wait(_REAP_S)
            self._process = self._start()
            assert self._process.stdin is not None
            lines = "".join(f"{one}\n" for one in sorted(self._listed | self._folders))
            self._process.stdin.write(lines.encode())
