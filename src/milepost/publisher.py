"""Commits of checkpoints whose files somebody else writes: another library, or an import.

A session is opened at the first of them, and goes on from the newest checkpoint of the run unless
told otherwise: nothing is restored here, so whoever loaded an older one has to say so.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence

import torch

from .checkpoint import Checkpoint
from .errors import CheckpointError, FencedError
from .format.manifest import FileEntry, Manifest
from .opening import Opening, Resume, WriterOptions
from .ranks.team import Solo
from .runs.keep import KeepPolicy, may_give_up
from .runs.manifests import ManifestCache
from .runs.prune import decide, prune
from .runs.publish import Claim, abandon, claim, point_latest, publish
from .runs.scan import State, scan
from .runs.sessions import Session
from .runs.unranked import Unranked
from .stores.base import Store
from .version import __version__

__all__ = ["Publisher"]

_log = logging.getLogger("milepost")


class Publisher:
    """Claims folders of a run and commits what was written into them.

    Args:
        store: The run's store.
        resume: ``auto`` goes on from the newest checkpoint; ``never`` refuses a run with any.
        origin: Name of the checkpoint to go on from, in place of the newest.
        keep: Retention, applied after a commit. Empty keeps everything.
        clock: Returns the seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        *,
        resume: Resume = "auto",
        origin: str | None = None,
        keep: Sequence[KeepPolicy] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._options = WriterOptions(resume=resume, keep=tuple(keep))
        self._origin = origin
        self._clock = clock
        self._session: Session | None = None
        self._parent: str | None = None
        self._attempt = 0
        self._held: Claim | None = None
        self._manifests = ManifestCache()
        self._unranked = Unranked(self._options.keep)

    def claim(self, name: str) -> Claim:
        """Take a folder, and remove what is left of an attempt that came to nothing.

        Raises:
            ExistsError: All folders of that name are taken; or ``resume="never"``, and the run
                holds checkpoints.
        """
        self.give_up()
        session = self._open()
        self._attempt += 1
        self._held = claim(self.store, session, name, self._attempt, clock=self._clock)
        return self._held

    def commit(
        self,
        *,
        items: Sequence[str],
        files: Sequence[FileEntry],
        world_size: int,
        like: Manifest | None = None,
    ) -> Checkpoint:
        """Commit what was written into the claimed folder.

        Args:
            items: The items of the state.
            files: Every file, durable.
            world_size: The number of ranks that wrote.
            like: Another checkpoint of the same state: its progress and metrics are told of it.

        Raises:
            FencedError: A newer session owns the run.
        """
        held, session = self._held, self._open()
        assert held is not None
        manifest = Manifest(
            name=held.folder,
            run_id=session.run_id,
            session=session.number,
            attempt=held.attempt,
            write_id=held.write_id,
            parent=self._parent,
            reason="manual" if like is None else like.reason,
            is_final=False if like is None else like.is_final,
            created_s=self._clock(),
            time={} if like is None else like.time,
            metrics={} if like is None else like.metrics,
            world_size=world_size,
            layout="milepost",
            items=tuple(items),
            files=tuple(sorted(files, key=lambda entry: entry.path)),
            software={
                "milepost": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            notes=() if like is None else like.notes,
            stats={"written_bytes": sum(entry.size_bytes for entry in files)},
        )
        try:
            publish(self.store, session, manifest)
        except FencedError:
            self._held = None  # whether it counts is for the newer session to say
            raise
        self._held, self._parent = None, held.folder
        self._manifests.forget(held.folder)
        problem = point_latest(self.store, held.folder)
        if problem is not None:
            _log.info("The pointer to the newest checkpoint was not updated: %s", problem)
        if may_give_up(self._options.keep):
            self._prune(session)
        return Checkpoint(self.store, held.folder, state=State.COMMITTED)

    def give_up(self) -> None:
        """Remove what was written for a claim that was not committed."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            left = abandon(self.store, held)
        except CheckpointError as error:
            _log.warning("%s of a failed save was not removed: %s", held.folder, error)
            return
        if left:
            _log.warning("After a failed save %s could not be removed: %s", held.folder, left)

    def _open(self) -> Session:
        if self._session is None:
            origin = None if self._origin is None else Checkpoint(self.store, self._origin)
            opening = Opening(self.store, self.store, self._options, Solo(), self._manifests)
            opened = opening.open(_leave_alone, check=_leave_alone, origin=origin)
            self._session, self._parent = opened.session, opened.resumed_from
        return self._session

    def _prune(self, session: Session) -> None:
        try:
            view = scan(self.store, self._manifests)
            self._unranked.look(view)
            report = prune(self.store, decide(view, self._options.keep), session=session, view=view)
        except FencedError:
            raise
        except CheckpointError as error:
            _log.warning("Retention failed and will be tried again after the next save: %s", error)
            return
        for name, reason in report.errors.items():
            _log.warning("The checkpoint %s was to be deleted and was not: %s", name, reason)


def _leave_alone(checkpoint: Checkpoint) -> None:
    """Restore nothing: the state is in other hands."""
    del checkpoint
