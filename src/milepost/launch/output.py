"""Where the output of a worker goes: to its log, and for one rank to the terminal as well."""

from __future__ import annotations

import codecs
import logging
import os
import sys
import threading
from pathlib import Path

from ..errors import storage_error

__all__ = ["Output", "Shown"]

_logger = logging.getLogger("milepost")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_JOIN_S = 5.0
_CHUNK_BYTES = 65536


class Output:
    """Takes the output of one worker.

    A log is written by the worker itself, so that nothing is lost if the launcher dies. What is
    also shown passes through a thread here, which writes the log first.

    Args:
        log: The file.
        is_shown: Whether it is also written to standard output.

    Raises:
        CheckpointError: The log cannot be opened.
    """

    def __init__(self, log: Path, *, is_shown: bool) -> None:
        try:
            self._log_fd = os.open(log, _FLAGS, 0o644)
        except OSError as error:
            raise storage_error(error, operation="open", path=str(log)) from error
        self._log = log
        self._read_fd = -1
        self._thread: threading.Thread | None = None
        self.fd = self._log_fd
        """What the worker writes to."""
        if is_shown:
            self._read_fd, self.fd = os.pipe()

    def started(self) -> None:
        """Begin to pass on what the worker writes. Call it once the worker has ``fd``."""
        if self._read_fd >= 0:
            os.close(self.fd)  # so that the pipe ends with the worker
            self.fd = -1
            self._thread = threading.Thread(
                target=self._pass_on, name="milepost-launch-output", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait for the last of it, and close the log."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                return  # a process that has left the group holds the pipe; the log stays open
        elif self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self.fd)
        os.close(self._log_fd)

    def _pass_on(self) -> None:
        shown, is_written = Shown(), True
        while chunk := os.read(self._read_fd, _CHUNK_BYTES):
            if is_written:
                is_written = self._write(chunk)
            shown.show(chunk)
        os.close(self._read_fd)

    def _write(self, chunk: bytes) -> bool:
        """Write to the log. Read on if it fails: a pipe that nobody reads stops the worker."""
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[os.write(self._log_fd, rest) :]
        except OSError as error:
            _logger.warning("%s is written no further: %s", self._log, error)
            return False
        return True


class Shown:
    """Writes the output of a worker to standard output, as long as somebody watches."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_watched = True

    def show(self, chunk: bytes) -> None:
        """Write some of it."""
        if not self._is_watched:
            return
        try:
            text = self._decoder.decode(chunk)
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        except (OSError, ValueError):
            self._is_watched = False  # whoever watched has left; the log goes on
