"""What a copy did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError

__all__ = ["CopyReport", "SyncReport"]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What the copy of one checkpoint took.

    Attributes:
        name: The checkpoint.
        url: Where the copy is.
        is_new: Whether it was committed there now; otherwise it was there, whole.
        num_files: How many files its commit lists.
        sent_bytes: Read from the source, compared with their checksums, and written.
        shared_bytes: Made by the target itself, from a file that is there already, or from the
            source where both are in one bucket. Only their size was compared.
        present_bytes: Left there by an earlier try; read, and compared with their checksums.
        verified_bytes: Read back from the target after the commit, and compared.
        skipped: Files of others in its folder that were left out, with the reason.
    """

    name: str
    url: str
    is_new: bool
    num_files: int
    sent_bytes: int = 0
    shared_bytes: int = 0
    present_bytes: int = 0
    verified_bytes: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What the copy of a run took.

    Attributes:
        url: Where the copy is.
        copied: The checkpoints that were committed there now.
        present: Names of those that were there already.
        skipped: Names of what was left out, with the reason: attempts, what cannot be read, and
            files whose names not every place takes.
        deleted: Names that were deleted there.
        num_records: Records and other files that were written.
        verified_bytes: Read back from the target, and compared.
        errors: Names that could not be copied, found whole or deleted, with the reason.
    """

    url: str
    copied: tuple[CopyReport, ...] = ()
    present: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    num_records: int = 0
    verified_bytes: int = 0
    errors: Mapping[str, CheckpointError] = field(default_factory=dict)
