"""One round of uploads: what is new or changed in a folder goes to the same keys in a store.

The copy can be read at any moment, so it goes up in this order:

    step                                          the copy, after a stop there
    records of runs and sessions                  a run with the checkpoints it had
    of a checkpoint, newest first:
      manifest there of another one: deleted      without that one; it is not here any more either
      objects there of another attempt: deleted   the same
      attempt.json                                incomplete, not counted
      its files                                   incomplete, not counted
      its manifest                                with the checkpoint
    all other files, then ``latest``              the same

A checkpoint that is there with the very same manifest is whole, so it is left alone. One that has
only the same ``attempt.json`` was begun: an object of the right size is of this attempt then, and
whole, since it was made after that. While a checkpoint is read it is held, so that retention waits.

Files of checkpoints that are one file here, by hard links, are uploaded once; the store makes the
other objects of the first. So it is with the names that people see of single-file checkpoints.

What is deleted here stays there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import final

from ..errors import CheckpointError, ExistsError, FormatError, MissingError
from ..format.layout import ATTEMPT, MANIFEST, RUN
from ..runs.manifests import read_manifest
from ..runs.readers import hold
from ..stores.local import LocalStore
from .changes import Changes
from .destination import Destination
from .lanes import Lanes
from .scan import FoundCheckpoint, FoundFile, Mark, Scan, scan

__all__ = ["SMALL_BYTES", "Mirror"]

_log = logging.getLogger("milepost")

SMALL_BYTES = 1024 * 1024
"""Files up to this size are read and uploaded at once."""


_Bytes = tuple[int, int, int, int]
"""What tells the bytes of an immutable file, by whatever name: device, number, size, time."""


@final
class Mirror:
    """Keep a copy of a folder in a store. Used by one thread.

    Args:
        root: The folder.
        destination: Where the copy is.
        prefix: What its keys begin with: empty, or ending in a slash.
        changes: Knows which files have changed.
        is_wanted: Says of a name directly in the folder whether to copy it.
    """

    def __init__(
        self,
        root: str,
        destination: Destination,
        *,
        prefix: str,
        changes: Changes,
        is_wanted: Callable[[str], bool],
    ) -> None:
        self._root = root
        self._destination = destination
        self._prefix = prefix
        self._changes = changes
        self._is_wanted = is_wanted
        self._runs: set[str] = set()
        self._whole: dict[str, Mark] = {}
        self._pointers: dict[str, str] = {}
        self._refused: set[str] = set()
        self._keys: dict[_Bytes, tuple[str, str]] = {}  # the checkpoint, and the object
        self._copied: dict[str, _Bytes] = {}

    def run(
        self, lanes: Lanes, *, tell: Callable[[Exception], None] = lambda _: None
    ) -> list[Exception]:
        """Upload what is new or changed.

        Args:
            lanes: What uploads.
            tell: Called with each error when it is known, which may be long before the end.

        Returns:
            The errors; what they prevented is tried again in the next round.
        """
        if not Path(self._root).is_dir():
            return []
        self._changes.begin(self._root)
        found = scan(self._root, self._is_wanted)
        self._forget_deleted(found)
        self._check_runs(found)
        errors: list[Exception] = []

        def note(more: list[Exception]) -> None:
            for error in more:
                errors.append(error)
                tell(error)

        note(self._send_changed(found.records, lanes))
        if errors:
            return errors  # a checkpoint without its session would not be on the lineage
        for checkpoint in self._new(found):
            try:
                note(self._send_checkpoint(checkpoint, lanes))
            except CheckpointError as error:
                note([error])
            lanes.check()
        note(self._send_changed(found.files, lanes))
        if not errors:
            self._point(found)
        return errors

    def _forget_deleted(self, found: Scan) -> None:
        """Remember no more than there is."""
        names = {one.key for one in found.checkpoints}
        self._whole = {key: mark for key, mark in self._whole.items() if key in names}
        self._keys = {b: one for b, one in self._keys.items() if one[0] in names}
        files = {file.key for kind in (found.records, found.files) for file in kind}
        self._copied = {key: what for key, what in self._copied.items() if key in files}
        self._changes.keep(files)

    def _check_runs(self, found: Scan) -> None:
        """Refuse to mix two runs.

        Raises:
            ExistsError: There is another run at the place.
        """
        for run in found.runs:
            if run in self._runs:
                continue
            key = f"{run}/{RUN}" if run else RUN
            there = self._destination.read(self._prefix + key)
            here = (Path(self._root) / key).read_bytes()
            if there is not None and _run_id(there) != _run_id(here):
                raise ExistsError(
                    f"Another run is at {self._destination.uri(self._prefix + run)}.",
                    safe="Nothing was uploaded over it.",
                    hint="Give each run an object_name_prefix of its own.",
                    path=self._prefix + run,
                )
            self._runs.add(run)

    def _new(self, found: Scan) -> list[FoundCheckpoint]:
        """Return the checkpoints that are not known to be there, the newest first."""
        ranked = []
        for one in found.checkpoints:
            if self._whole.get(one.key) != one.mark:
                try:
                    manifest = read_manifest(LocalStore(one.run), one.name)
                except MissingError:
                    continue  # deleted since
                except FormatError as error:
                    self._refuse(one.key, f"The checkpoint is not uploaded: {error}")
                    continue
                ranked.append((manifest.session, manifest.attempt, one))
        return [one for _, _, one in sorted(ranked, key=lambda rank: rank[:2], reverse=True)]

    def _send_checkpoint(self, checkpoint: FoundCheckpoint, lanes: Lanes) -> list[Exception]:
        with ExitStack() as stack:
            try:
                stack.enter_context(hold(LocalStore(checkpoint.run), checkpoint.name))
            except MissingError:
                return []  # deleted since
            folder = Path(checkpoint.run) / checkpoint.name
            key = self._prefix + checkpoint.key
            manifest = (folder / MANIFEST).read_bytes()
            files = checkpoint.files()
            if self._destination.read(f"{key}/{MANIFEST}") != manifest:
                there = self._begin(checkpoint, key)
                missing = [f for f in files if there.get(self._prefix + f.key) != f.size_bytes]
                errors = lanes.run([self._job(file, lanes) for file in missing])
                if errors:
                    return errors
                lanes.check()
                self._destination.store.put(f"{key}/{MANIFEST}", manifest)
            self._whole[checkpoint.key] = checkpoint.mark
            for file in files:
                self._keys[_bytes_of(file)] = checkpoint.key, self._prefix + file.key
        return []

    def _begin(self, checkpoint: FoundCheckpoint, key: str) -> dict[str, int]:
        """Make room for a checkpoint; return the size of each object of it that is there."""
        store = self._destination.store
        there = {entry.key: entry.size_bytes for entry in store.list(key)}
        if there.get(f"{key}/{MANIFEST}") is not None:
            store.delete(f"{key}/{MANIFEST}")
        claim = Path(checkpoint.run) / checkpoint.name / ATTEMPT
        mine = claim.read_bytes() if claim.exists() else None
        if mine is not None and self._destination.read(f"{key}/{ATTEMPT}") == mine:
            return there
        # The claim of another attempt goes last: until then a stop leaves that one's claim.
        for old in sorted(there, key=lambda one: one == f"{key}/{ATTEMPT}"):
            store.delete(old)
        self._changes.forget(checkpoint.key)
        self._keys = {b: one for b, one in self._keys.items() if one[0] != checkpoint.key}
        if mine is None:
            return {}
        store.put(f"{key}/{ATTEMPT}", mine)
        return {f"{key}/{ATTEMPT}": len(mine)}

    def _job(self, file: FoundFile, lanes: Lanes) -> Callable[[], None]:
        key = self._prefix + file.key

        def send() -> None:
            if file.size_bytes <= SMALL_BYTES:
                lanes.check()
                self._destination.store.put(key, Path(file.path).read_bytes())
            elif not self._copy(file):
                lanes.send(key, file.path)

        return send

    def _copy(self, file: FoundFile) -> bool:
        """Have the store copy what is there already under another key; return whether it did."""
        key = self._prefix + file.key
        _, source = self._keys.get(_bytes_of(file), ("", key))
        if source == key or not self._destination.can_copy:
            return False
        store = self._destination.store
        try:
            store.delete(key)
            store.link(source, key)
        except CheckpointError as error:
            # Gone, or too large for the service to copy: the bytes are here all the same.
            _log.debug("%s is uploaded, since it could not be copied: %s", key, error)
            return False
        return True

    def _send_changed(self, files: list[FoundFile], lanes: Lanes) -> list[Exception]:
        named = [file for file in files if self._can_be_named(file)]
        return lanes.run(
            [self._changed_job(file, lanes) for file in named if self._changes.may_differ(file)]
        )

    def _changed_job(self, file: FoundFile, lanes: Lanes) -> Callable[[], None]:
        key = self._prefix + file.key

        def send() -> None:
            if self._is_name_of_uploaded(file):
                return
            with self._changes.take(file) as taken:
                if taken is None:
                    return
                if taken.data is not None:
                    lanes.check()
                    self._destination.store.put(key, taken.data)
                else:
                    lanes.send(key, taken.path)

        return send

    def _is_name_of_uploaded(self, file: FoundFile) -> bool:
        """Return whether a file is one of a checkpoint's, and is there under its own key too."""
        what = _bytes_of(file)
        if self._copied.get(file.key) == what:
            return True
        if file.size_bytes <= SMALL_BYTES or not self._copy(file):
            return False
        self._copied[file.key] = what
        return True

    def _can_be_named(self, file: FoundFile) -> bool:
        key = self._prefix + file.key
        if self._destination.can_hold(key):
            return True
        self._refuse(
            key, f"{file.path} is not uploaded: its name holds what not every store takes in one."
        )
        return False

    def _refuse(self, key: str, why: str) -> None:
        if key not in self._refused:
            self._refused.add(key)
            _log.warning("%s", why)

    def _point(self, found: Scan) -> None:
        for key, target in found.pointers:
            if self._pointers.get(key) != target:
                self._destination.store.point(self._prefix + key, target)
                self._pointers[key] = target


def _run_id(record: bytes) -> object:
    fields = json.loads(record)
    return fields.get("run_id") if isinstance(fields, dict) else None


def _bytes_of(file: FoundFile) -> _Bytes:
    # Without the time of the entry, which a further name changes.
    return file.mark[:4]
