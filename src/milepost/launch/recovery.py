"""``launch``: workers that are brought back until the training is done.

Everything that lasts is a file below the launch's folder; a new launch of the same name gets a
folder of its own, and the training goes on from its checkpoints as after any other end.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, LaunchFailedError, Preempted, UsageError, storage_error
from ..liveness import Commit
from ..reporting.current import REPORTS, environment_of_reports
from ..validation.config import ValidationConfig
from .attempt import AttemptResult, Limits, run_attempt
from .config import RunConfig, ScalingConfig
from .engine import Asked, Engine, Event, Group, Plan
from .entry import Entry, function_entry, script_entry
from .environment import check_outside
from .failures import WorkerFailure, signature_of
from .here import finished_result, run_here, validate_left
from .machine import LocalEngine
from .policy import AttemptEnd, Ending, FailurePolicy, Restart, Stop
from .result import LaunchResult, launch_result
from .signals import LauncherSignals
from .summary import attempt_text, end_text, say

__all__ = ["LaunchResult", "launch"]

_FOLDER = ".launches"  # a name that no checkpoint has, so that it may stand in a run's folder


def launch(
    train: Callable[..., Any] | str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    config: Any = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    available: Callable[[], int] | None = None,
    engine: str | Engine = "local",
    validation: ValidationConfig | None = None,
) -> LaunchResult:
    """Run a function or a script on several workers, and bring them back when they fail.

    Every worker is a process with the environment that ``torchrun`` gives. If one fails, all are
    ended and, as ``FailureConfig`` allows, started again; the training must go on from its newest
    checkpoint, as it does with ``Checkpointer`` and ``Trainer``. What it reports with
    :func:`milepost.report` goes to the run that ``run`` names, and :func:`milepost.get_checkpoint`
    returns the newest checkpoint there.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the workers, which get ``grace_s`` to save and end.

    Args:
        train: A function at the top level of a module, or the path of a script.
        arguments: Arguments of the script.
        config: Passed to the function. Must be what JSON can hold.
        scaling: How many workers. Default: one.
        run: Where, and what is done about failures.
        available: Says before each attempt how many workers there may be. On this machine
            ``MILEPOST_SLOTS`` says it too.
        engine: Where they run: ``"local"``, on this machine; ``"ray"``, on the machines of a Ray
            cluster; or a ``RayEngine`` with options.
        validation: How checkpoints are validated that are reported with ``validation=True``.

    Returns:
        What the workers did and reported. Nothing is left running.

    Raises:
        LaunchFailedError: A worker failed and no attempt is left. Its ``result`` is the
            ``LaunchResult``.
        ExistsError: The run is finished, and ``if_finished="error"``.
        Preempted: The launcher was asked to end, and the workers have ended.
        UsageError: The function cannot be imported by workers.
        UnsupportedStateError: JSON cannot hold the config.
    """
    check_outside()
    run, scaling = run or RunConfig(), scaling or ScalingConfig()
    finished = finished_result(run, validation)
    if finished is not None:
        return finished
    if scaling.num_workers == 0:
        return run_here(train, config, run=run, validation=validation)
    if callable(train):
        if arguments:
            raise UsageError("A function takes no arguments.", hint="Give it a config.")
        entry = function_entry(train, config)
    else:
        if config is not None:
            raise UsageError("A script takes no config.", hint="Give it arguments.")
        entry = script_entry(train, arguments)
    return _Launch(
        entry,
        scaling=scaling,
        run=run,
        available=available,
        engine=_engine_of(engine, is_told=available is not None),
        validation=validation,
    ).run()


class _Launch:
    """The attempts of one launch."""

    def __init__(
        self,
        entry: Entry,
        *,
        scaling: ScalingConfig,
        run: RunConfig,
        available: Callable[[], int] | None,
        engine: Engine,
        validation: ValidationConfig | None,
    ) -> None:
        self._entry = entry
        self._scaling = scaling
        self._config = run
        self._available = available
        self._engine = engine
        self._validation = validation
        self._policy = FailurePolicy(run.failure_config)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._signals = LauncherSignals(self._events)
        self._attempts: list[AttemptResult] = []
        self._newest: Commit | None = None
        self._furthest_batch = -1
        self._folder = Path()

    def run(self) -> LaunchResult:
        """Make attempts until one finishes or none is left."""
        self._folder = _create_folder(self._config.folder)
        given = {"config": self._entry.config, "sys_path": self._entry.sys_path}
        _write(self._folder / "config.json", json.dumps(given))
        with self._signals, self._engine as engine:
            while True:
                attempt = self._attempt(engine)
                if attempt.ending is Ending.DONE:
                    break
                self._after(attempt)
        say(end_text(tuple(self._attempts)))
        validate_left(self._config, self._validation)
        return self._result()

    def _attempt(self, engine: Engine) -> AttemptResult:
        number = len(self._attempts) + 1
        folder = self._folder / f"attempt-{number}"
        try:
            plan, group = self._start(engine, number, folder)
        except CheckpointError as error:
            if number == 1:
                raise  # nothing has worked yet: whoever is there now can mend it
            attempt = _not_started(number, error.what, folder)
        else:
            attempt = self._watch(plan, group)
        self._attempts.append(attempt)
        if attempt.commit is not None:
            self._newest = attempt.commit
        return attempt

    def _start(self, engine: Engine, number: int, folder: Path) -> tuple[Plan, Group | None]:
        """Start the workers of an attempt; no group if there is not room for enough of them."""
        try:
            folder.mkdir()
        except OSError as error:
            raise storage_error(error, operation="create", path=str(folder)) from error
        fewest, most = self._scaling.bounds
        if self._available is not None:
            most = min(most, self._available())
        plan = Plan(
            number=number,
            num_workers=most if most < fewest else engine.reserve(fewest, most),
            arguments=self._entry.arguments,
            folder=self._folder,
            place=self._config.root,
            max_failures=self._config.failure_config.max_failures,
            variables={
                REPORTS: environment_of_reports(
                    self._config.place,
                    self._config.checkpoint_config,
                    self._validation,
                    local_cache=self._config.local_cache,
                )
            },
        )
        if plan.num_workers < fewest:
            return plan, None
        group = engine.group(plan, self._events)
        group.start()
        return plan, group

    def _watch(self, plan: Plan, group: Group | None) -> AttemptResult:
        if group is None:
            num, fewest = plan.num_workers, self._scaling.bounds[0]
            what = f"{num} workers are available and {fewest} are needed"
            return _not_started(plan.number, what, plan.attempt_folder, num_workers=num)
        failures = self._config.failure_config
        return run_attempt(
            group,
            number=plan.number,
            num_workers=plan.num_workers,
            folder=plan.attempt_folder,
            limits=Limits(
                grace_s=self._config.grace_s,
                failure_grace_s=failures.grace_s,
                hang_timeout_s=failures.hang_timeout_s,
                start_timeout_s=failures.start_timeout_s,
            ),
            events=self._events,
        )

    def _after(self, attempt: AttemptResult) -> None:
        """Wait for the next attempt, or raise what ends the launch."""
        if self._signals.received is not None:
            self._leave(attempt)
        cause = attempt.cause
        end = AttemptEnd(
            ending=attempt.ending,
            has_new_checkpoint=self._got_further(attempt.commit),
            is_final=cause is not None and cause.is_final,
            signature="" if cause is None else signature_of(cause),
        )
        decision = self._policy.decide(end, now_s=time.monotonic())
        say(attempt_text(attempt, newest=self._newest, decision=decision))
        if isinstance(decision, Stop):
            self._fail(attempt, decision)
        else:
            self._pause(decision, attempt)

    def _got_further(self, commit: Commit | None) -> bool:
        """Say whether a checkpoint is a gain.

        An error in the loop may leave a checkpoint of the batch before it. At the next attempt the
        same error leaves the same one again, and that is no progress.
        """
        if commit is None:
            return False
        if commit.batch is None:
            return True
        is_further = commit.batch > self._furthest_batch
        self._furthest_batch = max(self._furthest_batch, commit.batch)
        return is_further

    def _pause(self, decision: Restart, attempt: AttemptResult) -> None:
        due_s = time.monotonic() + decision.delay_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(event, Asked):
                self._leave(attempt)  # the rest is told late, of workers that are gone

    def _leave(self, attempt: AttemptResult) -> None:
        assert self._signals.received is not None
        say(attempt_text(attempt, newest=self._newest, decision=None))
        name = None if self._newest is None else self._newest.name
        raise Preempted(self._signals.received, name)

    def _fail(self, attempt: AttemptResult, decision: Stop) -> None:
        cause = attempt.cause
        where = "" if cause is None else f"Rank {cause.rank}: {cause.text}. "
        num = len(self._attempts)
        times = "1 attempt" if num == 1 else f"{num} attempts"
        safe = "No checkpoint was noted."
        if self._newest is not None:
            safe = f"The checkpoint {self._newest.name} is whole, and a new launch goes on from it."
        raise LaunchFailedError(
            f"{self._entry.label} failed after {times}. {where}{decision.reason}",
            safe=safe,
            hint=f"{decision.hint} The logs are in {attempt.folder}.",
            result=self._result(),
        )

    def _result(self) -> LaunchResult:
        last = self._attempts[-1]
        value = last.folder / "result.json"
        has_value = last.ending is Ending.DONE and value.exists()
        result = launch_result(
            self._config,
            attempts=tuple(self._attempts),
            return_value=json.loads(value.read_text(encoding="utf-8")) if has_value else None,
            error=last.cause,
            last_commit=None if self._newest is None else self._newest.name,
            folder=self._folder,
        )
        record = json.dumps(result.to_json(), indent=1, default=str)
        try:
            _write(self._folder / "result.json", record + "\n")
        except CheckpointError as error:
            say(f"milepost: the record of the launch is missing. {error}")
        return result


def _engine_of(given: str | Engine, *, is_told: bool) -> Engine:
    if not isinstance(given, str):
        return given
    if given == "local":
        return LocalEngine(is_told=is_told)
    if given == "ray":
        from .ray import RayEngine

        return RayEngine()
    raise UsageError(f"There is no engine {given!r}.", hint='Use "local" or "ray".')


def _create_folder(run_folder: Path) -> Path:
    """Create the folder of a launch, numbered from 1 on within the run."""
    parent = run_folder.absolute() / _FOLDER
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(one.name) for one in parent.iterdir() if one.name.isdecimal()]
        number = max(taken, default=0) + 1
        while True:
            folder = parent / str(number)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1  # another launch began at the same moment
    except OSError as error:
        raise storage_error(error, operation="create", path=str(parent)) from error


def _not_started(number: int, what: str, folder: Path, *, num_workers: int = 0) -> AttemptResult:
    failure = WorkerFailure(
        rank=0,
        at_s=time.time(),
        type="",
        message=what,
        traceback="",
    )
    return AttemptResult(
        number=number,
        num_workers=num_workers,
        ending=Ending.FAILED,
        duration_s=0.0,
        failures=(failure,),
        commit=None,
        num_batches=None,
        signal_number=None,
        folder=folder,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(error, operation="write", path=str(path)) from error
