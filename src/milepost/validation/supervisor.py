"""Validations: taken on, run in processes of their own, and each brought to a verdict.

    pending --a place is free------> attempt recorded, process started
    running --answers metrics------> VALIDATED
            --answers an error-----> VALIDATION_FAILED
            --too slow-------------> SIGTERM, grace, SIGKILL: VALIDATION_TIMEOUT
            --dies without answer--> pending again; VALIDATION_FAILED once too often
            --close()--------------> SIGTERM, grace, SIGKILL: pending on record, not counted

What a process has answered counts in every one of these cases, however the process ended.

One thread starts the processes and hears of their ends; it is there as long as there is work, and
sleeps until something happens or a deadline is due. It is no daemon: an interpreter that ends waits
for the validations that it has taken on. Everything that must outlast this process is on record
before it is acted upon, see ``runs/validations.py``.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from ..errors import CheckpointError, DeadlineError, UsageError
from ..format import tree
from ..processes.keeping import Keeper
from ..runs.validations import (
    Request,
    Validation,
    ValidationStatus,
    VerdictCache,
    begin_attempt,
    end_attempt,
    list_validations,
    record_verdict,
    request_validation,
    validation_id,
)
from ..stores.base import Store
from .config import ValidationConfig, ValidationTaskConfig
from .items import Item, pending_items, place_of, too_often
from .process import ValidationProcess

__all__ = ["Validations"]

_log = logging.getLogger("milepost")

_STOP_MARGIN_S = 70.0
_WAKE = ""


@dataclass(slots=True)
class _Running:
    """A validation whose process runs."""

    item: Item
    process: ValidationProcess
    due_s: float
    timeout_s: float
    is_late: bool = False
    is_stopped: bool = False


@final
class Validations:
    """The validations of one run, supervised by this process.

    Args:
        store: The run's store.
        run_id: Identity of the run, for messages.
        config: How checkpoints are validated.
        on_verdict: Called with each verdict once it is no longer pending here, mostly in the
            thread of the supervisor. One that could not be recorded is told as still pending.

    Raises:
        UsageError: Another process cannot open the run's store.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        config: ValidationConfig,
        on_verdict: Callable[[Validation], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._config = config
        self._on_verdict = on_verdict
        self._function, self._sys_path = config.reference
        self._place = place_of(store)
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._running: dict[str, _Running] = {}
        self._lost: dict[str, BaseException] = {}
        self._verdicts: VerdictCache = {}
        self._to_tell: queue.SimpleQueue[Validation] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_stopping = False

    def submit(self, name: str, write_id: str, task: ValidationTaskConfig | None = None) -> None:
        """Take on the validation of a committed checkpoint. Returns once that is on record.

        Args:
            name: The checkpoint.
            write_id: Its write id.
            task: What this one needs in place of the configuration's.

        Raises:
            UsageError: :meth:`close` was called.
        """
        task = task or ValidationTaskConfig()
        request = Request(dict(task.fn_kwargs or {}), task.timeout_s)
        if self._is_closed:
            raise UsageError("The validations of this run were closed.")
        request_validation(self._store, name, write_id, request)
        self._take_on([Item(name, write_id, request)])

    def resume_pending(self) -> int:
        """Take on what was asked for in an earlier life and has no verdict; return how many."""
        items = []
        for item, error in pending_items(self._store):
            if error is None:
                items.append(item)
                continue
            text = f"The request is lost: {error}"
            self._settle(item, ValidationStatus.FAILED, error=text)
        self._tell()
        return self._take_on(items)

    def pending(self) -> list[str]:
        """Return the checkpoints whose validation this process has taken on and not ended."""
        with self._changed:
            waiting = [one.name for one in self._queue]
            return sorted({*waiting, *(one.item.name for one in self._running.values())})

    def wait(self, *, timeout_s: float) -> None:
        """Wait until every validation has a verdict.

        Raises:
            DeadlineError: One has none in time. They go on.
            CheckpointError: One has none on record, since the store refused it. It is told to all
                who wait meanwhile, or else to who waits next, and then it is over.
        """
        with self._changed:
            lost = self._lost  # also if another waiter has been told of it first
            is_over = self._changed.wait_for(lambda: self._thread is None, timeout_s)
            errors = [*lost.values(), *self._lost.values()]
            if is_over:
                self._lost = {}
        if not is_over:
            names = self.pending()
            raise DeadlineError(
                f"No verdict came within {timeout_s:g} s on {', '.join(names)}.",
                safe="The checkpoints are whole, and none of these is deleted meanwhile.",
                hint="Wait longer, or give validations a timeout_s.",
                names=names,
            )
        for error in errors:
            raise error

    def close(self, *, timeout_s: float) -> None:
        """Wait for the verdicts, then stop what is left; that is taken up at the next start.

        Raises:
            CheckpointError: A verdict is not on record, since the store refused it.
            DeadlineError: A process does not even end on SIGKILL.
        """
        self._is_closed = True
        try:
            self.wait(timeout_s=timeout_s)
        except DeadlineError:
            _log.info("Validations are left for the next start: %s", ", ".join(self.pending()))
        finally:
            # After an interrupt as well: the interpreter would wait for the thread.
            self._stop()
        for error in self._lost.values():
            raise error

    def _stop(self) -> None:
        with self._changed:
            if self._thread is None:
                return
            self._is_stopping = True
            self._events.put(_WAKE)
            limit_s = self._config.grace_s + _STOP_MARGIN_S
            is_over = self._changed.wait_for(lambda: self._thread is None, limit_s)
        if not is_over:
            raise DeadlineError(
                f"The validations of {', '.join(self.pending())} did not stop in {limit_s:g} s.",
                hint="A process hangs in the kernel, most often on a disk that does not answer.",
            )

    def _take_on(self, items: list[Item]) -> int:
        with self._changed:
            known = {one.write_id for one in self._queue} | set(self._running)
            new = [one for one in items if one.write_id not in known]
            self._queue.extend(new)
            if self._thread is None and self._queue:
                self._begin()
            elif new:
                self._events.put(_WAKE)
        return len(new)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._supervise, name="milepost-validations")
        self._thread.start()

    # From here on everything runs in the supervisor's thread.

    def _supervise(self) -> None:
        try:
            keeper = Keeper()
            try:
                self._work(keeper)
            finally:
                self._drop_all()
                keeper.close()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            _log.exception("The supervisor of validations failed.")
            with self._changed:
                items = [*self._queue, *(one.item for one in self._running.values())]
                self._lost.update({one.name: error for one in items} or {"": error})
                self._queue.clear()
        finally:
            with self._changed:
                self._running = {}
                self._thread = None
                if self._queue and not self._is_stopping:
                    self._begin()  # taken on while this thread was about to end
                self._changed.notify_all()

    def _work(self, keeper: Keeper) -> None:
        while True:
            self._start_what_fits(keeper)
            with self._changed:
                if not self._running and (self._is_stopping or not self._queue):
                    return
            self._act(self._next_event())

    def _next_event(self) -> str:
        due_s = min((one.due_s for one in self._running.values()), default=math.inf)
        left_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic())
        try:
            return self._events.get(timeout=left_s)
        except queue.Empty:
            return _WAKE

    def _act(self, ended: str) -> None:
        if ended in self._running:
            self._end(self._running[ended])
        if self._is_stopping:
            for one in self._running.values():
                if not one.is_stopped:
                    one.is_stopped = True
                    self._ask_to_end(one)
        now_s = time.monotonic()
        for one in self._running.values():
            if one.due_s > now_s:
                continue
            if one.is_late or one.is_stopped:
                one.due_s = math.inf
                one.process.kill()
            else:
                one.is_late = True
                self._ask_to_end(one)

    def _ask_to_end(self, one: _Running) -> None:
        one.due_s = time.monotonic() + self._config.grace_s
        one.process.ask_to_end()

    def _start_what_fits(self, keeper: Keeper) -> None:
        while not self._is_stopping and len(self._running) < self._config.max_concurrent:
            with self._changed:
                if not self._queue:
                    return
                item = self._queue[0]
            running = None
            try:
                running = self._start(item, keeper)
            except CheckpointError as error:
                self._lose(item, error)
            with self._changed:
                self._queue.popleft()
                if running is not None:
                    self._running[item.write_id] = running
            self._tell()

    def _start(self, item: Item, keeper: Keeper) -> _Running | None:
        if not self._may_start(item):
            return None
        item.last_number = begin_attempt(self._store, item.name, item.write_id, item.last_number)
        item.num_attempts += 1
        task = self._task_of(item)
        process = ValidationProcess(
            task, keeper=keeper, on_end=lambda: self._events.put(item.write_id)
        )
        timeout_s = item.request.timeout_s or self._config.task_config.timeout_s or math.inf
        return _Running(item, process, time.monotonic() + timeout_s, timeout_s)

    def _may_start(self, item: Item) -> bool:
        """Look at the records once more: others may have tried, or have come to a verdict."""
        listed = list_validations(self._store, self._verdicts)
        known = listed.get((item.name, validation_id(item.write_id)))
        if known is None:
            return True
        item.num_attempts, item.last_number = known.num_attempts, known.last_number
        if not known.is_pending:
            return False
        if item.num_attempts > self._config.max_retries:
            self._settle(item, ValidationStatus.FAILED, error=f"{too_often(item)} {known.error}")
            return False
        return True

    def _task_of(self, item: Item) -> Mapping[str, Any]:
        kwargs = {**(self._config.task_config.fn_kwargs or {}), **item.request.fn_kwargs}
        return {
            "fn": self._function,
            "sys_path": self._sys_path,
            "place": self._place,
            "name": item.name,
            "write_id": item.write_id,
            "fn_kwargs": tree.encode(kwargs, path=("fn_kwargs",)),
        }

    def _end(self, one: _Running) -> None:
        """Take note of a process that has ended."""
        item = one.item
        answer, text = one.process.answer(), one.process.end_text
        is_again = False
        try:
            one.process.close()
            if answer is not None and answer.metrics is not None:
                self._settle(item, ValidationStatus.VALIDATED, metrics=answer.metrics)
            elif answer is not None:
                self._settle(item, ValidationStatus.FAILED, error=answer.error)
            elif one.is_late:
                error = f"It took longer than {one.timeout_s:g} s. {text}"
                self._settle(item, ValidationStatus.TIMEOUT, error=error)
            else:
                is_again = self._note_end(one, text)
        except CheckpointError as error:
            self._lose(item, error)
        with self._changed:
            del self._running[item.write_id]
            if is_again:
                self._queue.append(item)
        self._tell()

    def _note_end(self, one: _Running, text: str) -> bool:
        """Record that a process brought no answer; return whether to try once more."""
        item = one.item
        end_attempt(
            self._store,
            item.name,
            item.write_id,
            item.last_number,
            is_stopped=one.is_stopped,
            text=text,
        )
        if one.is_stopped:
            return False
        _log.warning("The validation of %s died: %s", item.name, text)
        if item.num_attempts > self._config.max_retries:
            self._settle(item, ValidationStatus.FAILED, error=f"{too_often(item)} {text}")
            return False
        return True

    def _settle(
        self,
        item: Item,
        status: ValidationStatus,
        *,
        metrics: Mapping[str, Any] | None = None,
        error: str = "",
    ) -> None:
        verdict = Validation(
            item.name,
            validation_id(item.write_id),
            status,
            metrics or {},
            error,
            item.num_attempts,
            item.last_number,
        )
        verdict = record_verdict(self._store, verdict, write_id=item.write_id)
        if verdict.error:
            _log.warning("%s: %s. %s", item.name, verdict.status, verdict.error)
        self._to_tell.put(verdict)

    def _lose(self, item: Item, error: CheckpointError) -> None:
        """Go on without a validation that cannot be recorded; it stays pending on record."""
        _log.warning("The validation of %s has no verdict on record: %s", item.name, error)
        with self._changed:
            self._lost[item.name] = error
        self._to_tell.put(
            Validation(
                item.name, validation_id(item.write_id), ValidationStatus.PENDING, error=str(error)
            )
        )

    def _tell(self) -> None:
        while not self._to_tell.empty():
            verdict = self._to_tell.get()
            try:
                self._on_verdict(verdict)
            except CheckpointError as problem:
                _log.warning("What follows the verdict on %s failed: %s", verdict.name, problem)

    def _drop_all(self) -> None:
        """Leave no process behind, whatever went wrong."""
        for one in list(self._running.values()):
            one.process.close()
