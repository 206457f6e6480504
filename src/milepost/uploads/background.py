"""Rounds of uploads on a thread of their own, until all is there."""

from __future__ import annotations

import logging
import threading
from typing import Literal, final

from ..errors import DeadlineError
from .lanes import Lanes
from .mirror import Mirror

__all__ = ["OnUploadError", "Rounds"]

_log = logging.getLogger("milepost")

_STOP_S = 30.0
OnUploadError = Literal["raise", "warn"]


@final
class Rounds:
    """Run rounds of a mirror in the background.

    Args:
        mirror: What is run.
        lanes: What uploads.
        on_error: Whether the error of a round is raised by :meth:`check`, or only logged.
    """

    def __init__(self, mirror: Mirror, lanes: Lanes, *, on_error: OnUploadError) -> None:
        self._mirror = mirror
        self._lanes = lanes
        self._on_error = on_error
        self._state = threading.Condition()
        self._num_asked = 0
        self._num_done = 0
        self._last_error: Exception | None = None
        self._untold: Exception | None = None
        self._is_ending = False
        # It reports through ``check`` and ``finish``, and is always told to end.
        self._thread = threading.Thread(target=self._work, name="milepost-uploads", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have a round begin after this moment; from any thread."""
        with self._state:
            self._num_asked += 1
            self._state.notify_all()

    def check(self) -> None:
        """Raise the error of a round that nobody was told about, if errors are to be raised.

        Raises:
            CheckpointError: What prevented an upload.
        """
        with self._state:
            error, self._untold = self._untold, None
        if error is not None:
            raise error

    def finish(self, *, timeout_s: float) -> Exception | None:
        """Run a last round and end; return its error, or that it did not end in time."""
        with self._state:
            self._num_asked += 1
            self._is_ending = True
            self._state.notify_all()
        try:
            self._thread.join(timeout_s)
        except BaseException:
            self._lanes.stop()
            raise
        is_late = self._thread.is_alive()
        if is_late:
            self._lanes.stop()
            self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._lanes.close()
        if not is_late:
            return self._last_error
        return DeadlineError(
            f"The last uploads did not end within {timeout_s:g} s.",
            safe="Everything is safe on this machine, and what was uploaded is whole.",
            hint="Give upload_timeout_s more, or resume the training: it uploads the rest first.",
        )

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._num_asked > self._num_done)
                begun = self._num_asked
                is_last = self._is_ending
            error = self._run_once()
            if is_last and error is not None:
                error = self._run_once()  # no other round comes that could try again
            with self._state:
                self._num_done = begun
                self._last_error = error
                if is_last:
                    return

    def _run_once(self) -> Exception | None:
        """Run a round and return its first error."""
        try:
            errors = self._mirror.run(self._lanes, tell=self._tell)
        except Exception as error:  # noqa: BLE001 - told, and returned
            self._tell(error)
            return error
        return errors[0] if errors else None

    def _tell(self, error: Exception) -> None:
        _log.warning("An upload failed and is tried again later: %s", error)
        if self._on_error == "raise":
            with self._state:
                self._untold = self._untold or error
