"""Rank 0 opens the run for all ranks and closes it after them; the others see that it is open."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from ..errors import CheckpointError, ExistsError, MissingError, UsageError
from ..format.layout import session_key
from ..opening import Opening, WriterOptions
from ..ranks.board import Board
from ..ranks.solo import Solo
from ..runs.manifests import ManifestCache, read_manifest
from ..runs.sessions import Origin, Session
from ..stores.base import Store
from ..validation.config import ValidationConfig
from .commit import Committer, RunFacts
from .config import CheckpointConfig
from .coordinator import Coordinator
from .finished import is_finished, mark_finished
from .history import History
from .validating import Validator

__all__ = ["Leader", "leave", "leave_unopened", "refuse_finished", "see_opened"]

_log = logging.getLogger("milepost")

_LEAVE_S = 10.0


class Leader:
    """What rank 0 does for all ranks of a run.

    Args:
        store: The run's store.
        board: Where ranks are heard and answered.
        config: What is kept, and how long things may take.
        validation: How checkpoints are validated, if that may be asked for.
    """

    def __init__(
        self,
        store: Store,
        board: Board,
        config: CheckpointConfig,
        *,
        validation: ValidationConfig | None,
    ) -> None:
        self._store = store
        self._board = board
        self._config = config
        self._validation = validation
        self._facts: RunFacts | None = None
        self._committer: Committer | None = None
        self._history: History | None = None
        self._coordinator: Coordinator | None = None

    def open(self, options: WriterOptions) -> RunFacts:
        """Open the run, and tell the other ranks."""
        store, board, config = self._store, self._board, self._config
        manifests = ManifestCache()
        # Alone: the others need not be here yet. They look at the place when they come.
        opened = Opening(store, store, options, Solo(), manifests).open(
            lambda _: None, check=lambda _: None, origin=None
        )
        name, base_number = opened.resumed_from, 0
        if name is not None:
            base_number = int(read_manifest(store, name).time.get("report", 0))
        facts = self._facts = RunFacts(
            session=opened.session,
            resumed_from=name,
            base_number=base_number,
            notes=opened.notes,
        )
        committer = self._committer = Committer(
            store,
            facts,
            policies=config.policies(),
            manifests=manifests,
            world_size=board.world_size,
        )
        committer.prune()
        self._history = History(store, facts.session.number, config.to_json())
        self._coordinator = Coordinator(
            board, committer, self._history, config=config, base_number=base_number
        )
        if self._validation is not None:
            self._coordinator.validator = Validator(
                store,
                run_id=facts.session.run_id,
                config=self._validation,
                on_verdict=lambda: board.send({"kind": "verdict", "rank": 0}),
            )
            self._coordinator.validator.resume()
        self._coordinator.start()
        board.post("opened", asdict(facts))
        return facts

    def close(self, value: Any, *, is_well: bool) -> None:
        """Wait for the other ranks to leave, and for validations, and close the run.

        Args:
            value: What the training returned.
            is_well: Whether it ended well here; validations are not waited for otherwise.

        Raises:
            CheckpointError: Something went wrong that no rank was told of.
        """
        assert self._facts is not None
        assert self._history is not None
        assert self._coordinator is not None
        wait_s = self._config.report_timeout_s + self._config.upload_timeout_s
        try:
            self._coordinator.join(2 * wait_s)
            self._history.close(self._config.report_timeout_s)
        finally:
            self._end_validations(is_well=is_well and self._coordinator.are_all_well)
        if self._coordinator.error is not None:
            raise self._coordinator.error
        if self._coordinator.are_all_well:
            mark_finished(self._store, self._facts.session.number, value)

    def _end_validations(self, *, is_well: bool) -> None:
        validator = None if self._coordinator is None else self._coordinator.validator
        if validator is not None:
            assert self._committer is not None
            validator.close(timeout_s=self._config.validation_timeout_s if is_well else 0.0)
            self._committer.prune()


def refuse_finished(store: Store) -> None:
    """Refuse a run that has come to its end.

    Raises:
        ExistsError: It has.
    """
    if is_finished(store):
        raise ExistsError(
            f"The run at {store.url} is finished.",
            safe="It was not touched.",
            hint="Read it with Result.from_path. To report more to it say "
            'if_finished="continue"; to begin anew choose another folder.',
            path=store.url,
        )


def see_opened(store: Store, board: Board, *, timeout_s: float) -> RunFacts:
    """Take the session from rank 0, and make sure that it is of the very place seen here.

    Raises:
        UsageError: It is not.
        DeadlineError: Rank 0 did not open the run.
    """
    fields = board.read("opened", task="Rank 0 opening the run", timeout_s=timeout_s)
    session = fields["session"]
    origin = session["origin"]
    session = Session(**{**session, "origin": None if origin is None else Origin(**origin)})
    try:
        store.head(session_key(session.number))
    except MissingError as error:
        raise UsageError(
            f"{store.url} is not the same place on every rank: this one does not see "
            f"session {session.number}, which rank 0 has just opened there.",
            safe="No checkpoint was touched.",
            hint="Use a folder that all machines share.",
            path=store.url,
        ) from error
    return RunFacts(**{**fields, "session": session, "notes": tuple(fields["notes"])})


def leave(board: Board, *, is_well: bool) -> None:
    """Tell the leader that this rank makes no more reports."""
    board.send({"kind": "end", "rank": board.rank, "is_well": is_well})
    board.flush(_LEAVE_S)


def leave_unopened(board: Board, error: BaseException) -> None:
    """Leave after the run could not be opened, so that no rank waits for nothing."""
    try:
        if board.rank != 0:
            leave(board, is_well=False)
            return
        board.post("opened", error=error)
        left = {0}
        while len(left) < board.world_size:
            messages = board.receive(_LEAVE_S)
            if not messages:
                break
            left |= {one["rank"] for one in messages if one["kind"] == "end"}
    except CheckpointError as second:
        _log.info("Left the other ranks without a goodbye: %s", second)
    finally:
        board.close()
