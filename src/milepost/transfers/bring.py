"""The files of one checkpoint, into a folder that was claimed for them.

Each file comes the cheapest way there is: it is there already, as an earlier try left it and as its
checksums say; or the target makes it from a file that it has, or the bucket that both are in; or it
is sent, and each block compared with its checksum before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from ..copies.transfer import FileCopy, copy_files
from ..errors import CheckpointError
from ..format.manifest import FileEntry, Manifest
from ..runs.folders import file_key
from ..runs.verify import verify_files
from .claims import CopyClaim
from .reports import CopyReport
from .route import Route, copies_by_itself

__all__ = ["Progress", "Shared", "bring"]

Progress = Callable[[int], None]
_What = tuple[int, tuple[int, ...]]


@final
class Shared:
    """Files of checkpoints at the target that others may share, as they did at the source.

    Equal sizes and checksums alone prove little; that the source says of one of the two that it is
    that of another checkpoint makes it certain.
    """

    def __init__(self) -> None:
        self._keys: dict[_What, tuple[str, bool]] = {}

    def note(self, folder: str, manifest: Manifest) -> None:
        """Remember the files of a checkpoint that is there."""
        for entry in manifest.files:
            key, is_linked = file_key(folder, entry.path), entry.linked_from is not None
            self._keys.setdefault((entry.size_bytes, entry.crcs), (key, is_linked))

    def find(self, entry: FileEntry) -> str | None:
        """Return the key of a file that holds the same bytes, if there is one."""
        key, is_linked = self._keys.get((entry.size_bytes, entry.crcs), (None, False))
        return key if is_linked or entry.linked_from is not None else None


@dataclass(slots=True)
class _Tally:
    sent: list[FileEntry] = field(default_factory=list)
    shared_bytes: int = 0
    present_bytes: int = 0


def bring(
    route: Route,
    source_folder: str,
    claim: CopyClaim,
    *,
    shared: Shared,
    num_threads: int,
    progress: Progress,
) -> CopyReport:
    """Bring the files of a checkpoint into a claimed folder, durably, and say how.

    Raises:
        MissingError: A file is not in the source.
        DamagedError: A file of the source does not match its checksum.
    """
    manifest, target, folder = claim.commit.manifest, route.target, claim.folder
    tally = _Tally()
    left = _left_over(claim, progress)
    for entry in manifest.files:
        key = file_key(folder, entry.path)
        if entry.path in left:
            if left[entry.path]:
                tally.present_bytes += entry.size_bytes
                continue
            target.delete(key)
        if _share(route, file_key(source_folder, entry.path), key, entry, shared):
            tally.shared_bytes += entry.size_bytes
            progress(entry.size_bytes)
        else:
            tally.sent.append(entry)
    copy_files(
        route.source,
        target,
        [
            FileCopy(
                file_key(source_folder, entry.path),
                file_key(folder, entry.path),
                entry.size_bytes,
                entry,
            )
            for entry in tally.sent
        ],
        num_threads=num_threads,
        keep_whole=True,
        progress=progress,
    )
    return CopyReport(
        manifest.name,
        f"{target.url}/{folder}".rstrip("/"),
        is_new=True,
        num_files=len(manifest.files),
        sent_bytes=sum(entry.size_bytes for entry in tally.sent),
        shared_bytes=tally.shared_bytes,
        present_bytes=tally.present_bytes,
    )


def _left_over(claim: CopyClaim, progress: Progress) -> Mapping[str, bool]:
    """Return the files that are there, and whether each is whole."""
    manifest = claim.commit.manifest
    there = {
        entry.path: claim.there.get(file_key(claim.folder, entry.path)) for entry in manifest.files
    }
    sized = [entry for entry in manifest.files if there[entry.path] == entry.size_bytes]
    problems = verify_files(claim.store, claim.folder, manifest, sized, progress=progress)
    bad = {problem.path for problem in problems}
    good = {entry.path for entry in sized} - bad
    return {path: path in good for path, size in there.items() if size is not None}


def _share(route: Route, source_key: str, key: str, entry: FileEntry, shared: Shared) -> bool:
    """Let the target, or the bucket that both are in, make a file; return whether it did."""
    found = shared.find(entry) if copies_by_itself(route.target) else None
    if found is not None and found != key:
        try:
            route.target.link(found, key)
            if route.target.head(key).size_bytes == entry.size_bytes:
                return True
            route.target.delete(key)
        except CheckpointError:
            # Gone since, or too large for the service to copy: there is another way.
            if route.bucket is None:
                return False
    if not route.copy_within(source_key, key):
        return False
    if route.target.head(key).size_bytes == entry.size_bytes:
        return True
    route.target.delete(key)
    return False
