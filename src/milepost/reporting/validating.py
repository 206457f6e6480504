"""Validations of reported checkpoints, from the process of rank 0."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointError, DeadlineError
from ..liveness import beat
from ..runs.scan import scan
from ..runs.sessions import read_run
from ..stores.base import Store
from ..validation.config import ValidationConfig, ValidationTaskConfig
from ..validation.supervisor import Validations
from .commit import asked_validation

__all__ = ["Validator", "asked_with", "finish_validations"]

_log = logging.getLogger("milepost")

_BEAT_S = 1.0


class Validator:
    """Takes on validations, and says when there are verdicts.

    Args:
        store: The run's store.
        run_id: Identity of the run.
        config: How checkpoints are validated.
        on_verdict: Called after each verdict, in another thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        config: ValidationConfig,
        on_verdict: Callable[[], None],
    ) -> None:
        self._store = store
        self._validations = Validations(
            store, run_id=run_id, config=config, on_verdict=lambda _: on_verdict()
        )

    def resume(self) -> None:
        """Take on what earlier sessions have left without a verdict, or without a request."""
        for found in scan(self._store).lineage():
            manifest = found.manifest
            if manifest is None or found.validation is not None:
                continue
            asked = asked_validation(manifest)
            if asked is not None:
                self.submit(manifest.name, manifest.write_id, asked)
        count = self._validations.resume_pending()
        if count:
            _log.info("%d validations of earlier sessions are taken up again.", count)

    def submit(self, name: str, write_id: str, asked: Mapping[str, Any]) -> None:
        """Take on the validation of a committed checkpoint. Returns once that is on record."""
        self._validations.submit(name, write_id, ValidationTaskConfig(**asked))

    @property
    def is_idle(self) -> bool:
        """Return whether no verdict is waited for."""
        return not self._validations.pending()

    def call_when_idle(
        self, then: Callable[[CheckpointError | None], None], *, timeout_s: float
    ) -> None:
        """Call a function in another thread once every validation has its verdict.

        Args:
            then: Gets the error if one has none in time, or never will.
            timeout_s: How long to wait.
        """

        def wait() -> None:
            try:
                self._validations.wait(timeout_s=timeout_s)
            except CheckpointError as error:
                then(error)
            else:
                then(None)

        threading.Thread(target=wait, name="milepost-validated", daemon=True).start()

    def close(self, *, timeout_s: float) -> None:
        """Wait for the verdicts; what has none then is taken up at the next start.

        A launcher is told meanwhile that this process gets on.

        Raises:
            CheckpointError: A verdict could not be recorded.
        """
        try:
            self._wait(timeout_s)
        finally:
            self._validations.close(timeout_s=0)
        left = [one.name for one in scan(self._store).found if one.is_pending_validation]
        if left:
            _log.warning("Left without a verdict until the next start: %s", ", ".join(left))

    def _wait(self, timeout_s: float) -> None:
        left_s = timeout_s
        while left_s > 0:
            beat()
            try:
                self._validations.wait(timeout_s=min(_BEAT_S, left_s))
            except DeadlineError:
                left_s -= _BEAT_S
            else:
                return


def finish_validations(store: Store, config: ValidationConfig, *, timeout_s: float) -> None:
    """Bring to an end what a finished training has left without a verdict.

    Args:
        store: The run's store.
        config: How checkpoints are validated.
        timeout_s: How long to wait, in seconds.

    Raises:
        MissingError: There is no run.
        CheckpointError: A verdict could not be recorded.
    """
    run_id = read_run(store).run_id
    validator = Validator(store, run_id=run_id, config=config, on_verdict=lambda: None)
    try:
        validator.resume()
    finally:
        validator.close(timeout_s=timeout_s)


def asked_with(validation: bool | ValidationTaskConfig) -> dict[str, Any] | None:  # noqa: FBT001
    """Return what travels of ``report(validation=...)``."""
    if validation is False:
        return None
    task = ValidationTaskConfig() if validation is True else validation
    kwargs = None if task.fn_kwargs is None else dict(task.fn_kwargs)
    return {"fn_kwargs": kwargs, "timeout_s": task.timeout_s}
