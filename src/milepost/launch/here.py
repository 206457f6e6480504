"""A training in the launcher's own process, and one that has nothing left to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError, ExistsError, LaunchFailedError, MissingError, UsageError
from ..reporting.finished import is_finished, returned_by
from ..reporting.session import Reports, in_use
from ..reporting.validating import finish_validations
from ..stores.url import open_store
from ..validation.config import ValidationConfig
from .config import RunConfig
from .entry import call, check_json
from .result import LaunchResult, launch_result
from .summary import say

__all__ = ["finished_result", "run_here"]


def finished_result(
    run: RunConfig, validation: ValidationConfig | None = None
) -> LaunchResult | None:
    """Return the result of a run that is finished, if that is what is wanted then.

    Validations that it has left without a verdict are brought to an end.

    Raises:
        ExistsError: It is finished, and ``if_finished="error"``.
    """
    store = open_store(run.place)
    if run.if_finished == "continue" or not is_finished(store):
        return None
    if run.if_finished == "error":
        raise ExistsError(
            f"The run at {run.place} is finished.",
            safe="It was not touched.",
            hint='To go on from its newest checkpoint use if_finished="continue"; to begin anew '
            "choose another name.",
            path=run.place,
        )
    say(
        f"milepost: the run at {run.place} is finished, so nothing was started. "
        'To go on from its newest checkpoint use if_finished="continue".'
    )
    validate_left(run, validation)
    return launch_result(run, return_value=returned_by(store), folder=run.folder)


def validate_left(run: RunConfig, validation: ValidationConfig | None) -> None:
    """Bring to an end the validations that a training has left without a verdict.

    What cannot be is told, and hides nothing of what the training did.
    """
    if validation is None:
        return
    timeout_s = run.checkpoint_config.validation_timeout_s
    try:
        finish_validations(open_store(run.place), validation, timeout_s=timeout_s)
    except MissingError:
        return  # nothing was reported
    except CheckpointError as error:
        say(f"milepost: a validation has no verdict. {error}")


def run_here(
    train: Any, config: Any, *, run: RunConfig, validation: ValidationConfig | None
) -> LaunchResult:
    """Call a function in this process, which reports to the run as a worker does.

    Raises:
        LaunchFailedError: It raised. The cause is what it raised.
        UsageError: It is not a function.
    """
    if not callable(train):
        raise UsageError(
            "A script runs in workers only.", hint="Use num_workers=1, or give a function."
        )
    check_json(config, "config")
    reports = Reports(
        run.place,
        checkpoint_config=run.checkpoint_config,
        validation=validation,
        local_cache=run.local_cache,
        if_finished="continue",
    )
    in_use.push(reports)
    try:
        value = _call(train, config, reports)
    except Exception as error:
        raise LaunchFailedError(
            f"{getattr(train, '__qualname__', train)} failed: {type(error).__name__}: {error}",
            safe="Checkpoints that were reported are whole, and a new launch goes on from them.",
            hint="The traceback above says where.",
            result=launch_result(run, error=error, folder=run.folder),
        ) from error
    finally:
        in_use.pop(reports)
    return launch_result(run, return_value=value, folder=run.folder)


def _call(train: Callable[..., Any], config: Any, reports: Reports) -> Any:
    try:
        value = call(train, config)
        check_json(value, "the return value")
    except BaseException as error:
        reports.close_after(error)
        raise
    reports.close(value=value)
    return value
