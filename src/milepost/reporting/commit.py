"""The leader's part of a report: claim a folder, commit what the ranks wrote, keep what is to stay.

The steps on the store are those of every checkpoint, see ``runs/publish.py``. Files that the user
has written into the run are adopted: their folder gets a claim, each file is read, checksummed and
made durable, and the manifest comes last. A stop before it leaves the user's files where they were.
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, FencedError, InUseError, UsageError
from ..format import tree
from ..format.layout import ATTEMPT, check_name
from ..format.manifest import FileEntry, Manifest
from ..liveness import note_commit
from ..metrics import flatten
from ..runs.folders import candidates
from ..runs.keep import KeepPolicy, may_give_up
from ..runs.leftovers import Leftovers
from ..runs.manifests import ManifestCache
from ..runs.prune import decide, prune
from ..runs.publish import Claim, adopt, claim, point_latest, publish
from ..runs.scan import scan
from ..runs.sessions import Session
from ..stores.base import Store
from ..version import __version__
from .files import check_path, find_files

__all__ = ["Committer", "RunFacts", "asked_validation", "nested_metrics"]

_log = logging.getLogger("milepost")

VALIDATION = "validation"
"""Field of a manifest with what its validation was asked for with, if one was."""

REPORTED = "reported"
"""Field of a manifest with the metrics as they were nested, where they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What every rank knows of the open run.

    Attributes:
        session: The session.
        resumed_from: The checkpoint that the run goes on from, or ``None``.
        base_number: Number of the report that made it; 0 after a fresh start.
        notes: What a user should know about the start.
    """

    session: Session
    resumed_from: str | None
    base_number: int
    notes: tuple[str, ...] = ()


class Committer:
    """Commits reported checkpoints of one session.

    Args:
        store: The run's store.
        facts: The run.
        policies: Retention.
        manifests: Remembers what is read of the run.
        world_size: The number of ranks.
        clock: Returns the seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        *,
        policies: Sequence[KeepPolicy],
        manifests: ManifestCache,
        world_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.newest = facts.resumed_from
        self._facts = facts
        self._policies = policies
        self._manifests = manifests
        self._world_size = world_size
        self._clock = clock
        self._attempt = 0
        self._leftovers = Leftovers(store)

    def default_name(self, number: int) -> str:
        """Return the name of the checkpoint of a report that was given none."""
        return f"report-{self._facts.base_number + number}"

    def claim(self, name: str) -> Claim:
        """Take a folder: of that name, or with a suffix if it is taken."""
        self._attempt += 1
        return claim(self.store, self._facts.session, check_name(name), self._attempt)

    def free_name(self, name: str) -> str:
        """Return a name that is not taken, for a folder that the user will write."""
        check_name(name)
        for one in candidates(name, self._facts.session.number, self._attempt + 1):
            if next(iter(self.store.list(one)), None) is None:
                return one
        return name  # and adopting it says what is there

    def adopt(self, folder: str) -> tuple[Claim, list[str]]:
        """Take a folder that the user has written, and return the paths of its files.

        Raises:
            UsageError: It holds no file, or something that a checkpoint cannot hold.
        """
        if next(iter(self.store.list(check_name(folder))), None) is None:
            raise UsageError(
                f"There are no files in {folder} at {self.store.url}.",
                hint="Report the checkpoint when its files have been written.",
                path=folder,
            )
        self._attempt += 1
        held = adopt(self.store, self._facts.session, folder, self._attempt)
        try:
            return held, self._adoptable(folder)
        except BaseException as error:
            self.abandon(held, error)
            raise

    def publish(
        self,
        held: Claim,
        files: Sequence[FileEntry],
        *,
        number: int,
        metrics: Mapping[str, Any],
        stats: Mapping[str, Any],
        validation: Mapping[str, Any] | None,
    ) -> Manifest:
        """Commit a checkpoint. Returning is the acknowledgement."""
        session = self._facts.session
        flat = flatten(metrics)
        extra: dict[str, Any] = {}
        if flat != metrics:
            extra[REPORTED] = tree.encode(dict(metrics))
        if validation is not None:
            # Were it only asked for afterwards, a stop in between would leave it unasked for ever.
            extra[VALIDATION] = tree.encode(dict(validation))
        manifest = Manifest(
            name=held.folder,
            run_id=session.run_id,
            session=session.number,
            attempt=held.attempt,
            write_id=held.write_id,
            parent=self.newest,
            reason="report",
            is_final=False,
            created_s=self._clock(),
            time={"report": self._facts.base_number + number},
            metrics=flat,
            world_size=self._world_size,
            layout="files",
            items=(),
            files=tuple(sorted(files, key=lambda entry: entry.path)),
            software=_software(),
            stats=stats,
            extra=extra,
        )
        publish(self.store, session, manifest)
        self.newest = manifest.name
        self._manifests.forget(manifest.name)
        return manifest

    def after_commit(self, manifest: Manifest) -> None:
        """Show the new checkpoint to people, and apply retention."""
        problem = point_latest(self.store, manifest.name)
        if problem is not None:
            _log.info("The pointer to the newest checkpoint was not updated: %s", problem)
        note_commit(manifest.name)
        self._leftovers.remove()
        self.prune()

    def prune(self) -> None:
        """Delete what no policy keeps.

        Raises:
            FencedError: A newer session owns the run.
        """
        if not may_give_up(self._policies):
            return
        try:
            view = scan(self.store, self._manifests)
            decisions = decide(view, self._policies)
            report = prune(self.store, decisions, session=self._facts.session, view=view)
        except FencedError:
            raise
        except CheckpointError as error:
            _log.warning("Retention failed and will be tried again: %s", error)
            return
        for name, reason in report.errors.items():
            level = logging.INFO if isinstance(reason, InUseError) else logging.WARNING
            _log.log(level, "The checkpoint %s was to be deleted and was not: %s", name, reason)

    def abandon(self, held: Claim, error: BaseException) -> None:
        """Remove what a failed report wrote; say so where that fails too."""
        if not isinstance(error, FencedError):
            self._leftovers.give_up(held, error)

    def _adoptable(self, folder: str) -> list[str]:
        """Return the paths of the files in an adopted folder."""
        start = len(folder) + 1
        paths = [entry.key[start:] for entry in self.store.list(folder)]
        paths.remove(ATTEMPT)
        for path in paths:
            check_path(path, where=folder)
        local = self.store.local_path(folder)
        others: set[str] = set()
        if local is not None:
            # What the store does not list as files would be missing in silence.
            others = {one.path for one in find_files(local, leave_out=(ATTEMPT,))} - {*paths}
        if others:
            raise UsageError(
                f"{folder} holds links, which cannot be committed in place: "
                f"{', '.join(sorted(others)[:8])}.",
                safe="Nothing was changed.",
                hint="Put the files themselves there, or let report() upload the folder.",
                path=folder,
            )
        return paths


def asked_validation(manifest: Manifest) -> dict[str, Any] | None:
    """Return what the validation of a checkpoint was asked for with, or ``None``."""
    stored = manifest.extra.get(VALIDATION)
    return None if stored is None else dict(tree.decode(stored))


def nested_metrics(manifest: Manifest) -> dict[str, Any]:
    """Return the metrics of a reported checkpoint as they were nested."""
    stored = manifest.extra.get(REPORTED)
    return dict(manifest.metrics) if stored is None else dict(tree.decode(stored))


def _software() -> dict[str, str]:
    versions = {"milepost": __version__, "python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is not None:
        versions["torch"] = str(getattr(torch, "__version__", ""))
    return versions
