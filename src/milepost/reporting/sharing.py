"""Files of several ranks in one checkpoint: who writes which, and that none differ by one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MismatchError, UsageError
from ..format.manifest import FileEntry

__all__ = ["merged", "share_out"]


def share_out(offers: Mapping[int, Mapping[str, Any]]) -> list[list[Any]]:
    """Return for each rank the paths that another one writes: a file that several have.

    Raises:
        MismatchError: Two ranks have files of one name and different sizes.
        UsageError: No rank has a file.
    """
    seen: dict[str, tuple[int, int]] = {}
    skip: dict[int, list[str]] = {rank: [] for rank in offers}
    for rank, offer in sorted(offers.items()):
        for path, size in offer["files"]:
            first, first_size = seen.setdefault(path, (rank, size))
            if first == rank:
                continue
            if size != first_size:
                raise _collision(path, first, rank, "sizes")
            skip[rank].append(path)
    if not seen:
        raise UsageError(
            "The reported folder holds no files.",
            safe="Nothing was committed; earlier checkpoints are intact.",
            hint="Write the checkpoint before it is reported, or report metrics only.",
        )
    return [[rank, paths] for rank, paths in skip.items()]


def merged(files: Mapping[int, list[FileEntry]]) -> list[FileEntry]:
    """Return each file once.

    Raises:
        MismatchError: Two ranks have files of one name and different bytes.
    """
    seen: dict[str, tuple[int, FileEntry]] = {}
    for rank, entries in sorted(files.items()):
        for entry in entries:
            first, known = seen.setdefault(entry.path, (rank, entry))
            if (known.size_bytes, known.crcs) != (entry.size_bytes, entry.crcs):
                raise _collision(entry.path, first, rank, "bytes")
    return [entry for _, entry in seen.values()]


def _collision(path: str, first: int, second: int, what: str) -> MismatchError:
    return MismatchError(
        f"Rank {first} and rank {second} both have a file {path}, of different {what}.",
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint="Put the rank into the names of files that differ: model-rank=0.pt.",
        path=path,
        ranks=[first, second],
    )
