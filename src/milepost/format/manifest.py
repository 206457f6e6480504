"""The manifest: the record whose existence is the commit.

It names every file of a checkpoint with its size and the CRC32C of each 8 MiB block, says when and
by whom it was made, and carries the metrics. It stays small, so that listing a run is quick; what
each tensor is stands in the index, which the manifest vouches for like any other file.

Fields that this version does not know are kept through a read and a write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import FormatError, NewerFormatError
from . import canonical, tree
from .digest import block_count, file_crc
from .frames import Frames
from .layout import check_key
from .numbers import is_count, is_finite, is_moment, takes_float

__all__ = ["FORMAT_VERSION", "FileEntry", "Manifest"]

FORMAT_VERSION = 1

_FRAMES_VERSION = 2
"""The format of a manifest that lists a compressed file, and of no other record."""

_MAX_MANIFEST_BYTES = 32 * 1024 * 1024
_MAX_FILES = 1_000_000
_MAX_FILE_BYTES = 2**60
_TREES = ("time", "metrics", "software", "stats", "interval")
_CRCS = re.compile(r"(?:[0-9a-f]{8})*")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: Relative to the checkpoint's folder.
        size_bytes: Its exact size.
        crcs: CRC32C of each block of ``digest.BLOCK_BYTES``, the last one shorter.
        linked_from: Name of the checkpoint whose unchanged file this one shares, if any.
        frames: How its bytes are compressed; ``None``: not at all. Size and checksums above are
            those of the file as it is stored.
    """

    path: str
    size_bytes: int
    crcs: tuple[int, ...]
    linked_from: str | None = None
    frames: Frames | None = None

    @property
    def plain(self) -> FileEntry:
        """Return what the entry would be if the file were not compressed."""
        if self.frames is None:
            return self
        return FileEntry(self.path, self.frames.size_bytes, self.frames.crcs, self.linked_from)

    @property
    def crc(self) -> int:
        """Return the CRC32C of the whole file."""
        return file_crc(self.crcs, self.size_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        entry: dict[str, Any] = {
            "path": self.path,
            "size": self.size_bytes,
            "crc32c": "".join(f"{crc:08x}" for crc in self.crcs),
        }
        if self.linked_from is not None:
            entry["linked_from"] = self.linked_from
        if self.frames is not None:
            entry["frames"] = self.frames.to_json()
        return entry

    @classmethod
    def from_json(cls, entry: Any, *, where: str) -> FileEntry:
        """Read an entry and check it.

        Raises:
            FormatError: A bad path, size or number of checksums.
        """
        try:
            path = check_key(entry["path"], where=where)
            size, text, linked = entry["size"], entry["crc32c"], entry.get("linked_from")
            framed = entry.get("frames")
            if not _CRCS.fullmatch(text):
                raise FormatError(f"{where} lists malformed checksums for {path}.", path=where)
        except (TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{where} lists a malformed file entry.", path=where) from error
        crcs = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        if type(size) is not int or not 0 <= size <= _MAX_FILE_BYTES:
            raise FormatError(f"{where} gives {path} an impossible size.", path=where)
        if len(crcs) != block_count(size):
            raise FormatError(f"{where} has the wrong number of checksums for {path}.", path=where)
        if linked is not None:
            check_key(linked, where=where)
        frames = None
        if framed is not None:
            frames = Frames.from_json(framed, stored_bytes=size, where=where, path=path)
        return cls(path, size, crcs, linked, frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed checkpoint.

    Attributes:
        name: Name of the checkpoint, the name of its folder.
        run_id: Identity of the run it was written in.
        session: Number of the session that wrote it.
        attempt: Number of the attempt within the session; grows with every save.
        write_id: Random identity of this attempt, to tell our own write from another's.
        parent: Name of the checkpoint before it on the lineage, or ``None``.
        reason: Why it was made: ``interval``, ``manual``, ``final``, ``signal``, ``exception``,
            ``nan``, ``report``.
        is_final: Whether training had ended.
        created_s: Seconds since 1970 by the writer's clock. For people; nothing is decided by it
            but ages in retention.
        time: Progress counters: epoch, batch, sample, token, batch_in_epoch, ..., wall_s.
        metrics: Numbers by name, non-finite ones included.
        world_size: Number of writing ranks.
        layout: ``milepost``, ``torch`` (one file for ``torch.load``) or ``files`` (the user's own).
        items: Names of the top-level parts of the state.
        files: Every file, with sizes and checksums.
        software: Versions of what wrote it.
        notes: What resuming from it cannot reproduce exactly, in plain words.
        stats: What the save cost: bytes and seconds by name.
        interval: Why it was due then, and what that was found out from; empty where the interval
            was given.
        extra: Fields of other versions, kept as they are.
    """

    name: str
    run_id: str
    session: int
    attempt: int
    write_id: str
    parent: str | None
    reason: str
    is_final: bool
    created_s: float
    time: Mapping[str, Any]
    metrics: Mapping[str, Any]
    world_size: int
    layout: str
    items: tuple[str, ...]
    files: tuple[FileEntry, ...]
    software: Mapping[str, str]
    notes: tuple[str, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    interval: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Return the sum of the sizes of the files as they are stored, linked ones included."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def plain_bytes(self) -> int:
        """Return the sum of the sizes that the files would have if none were compressed."""
        return sum(entry.plain.size_bytes for entry in self.files)

    @property
    def is_compressed(self) -> bool:
        """Return whether any of the files is compressed."""
        return any(entry.frames is not None for entry in self.files)

    def file(self, path: str) -> FileEntry:
        """Return the entry of one file.

        Raises:
            FormatError: The manifest does not list it.
        """
        for entry in self.files:
            if entry.path == path:
                return entry
        raise FormatError(f"The manifest of {self.name} lists no file {path}.", path=path)

    def to_bytes(self) -> bytes:
        """Return the sealed record."""
        body: dict[str, Any] = dict(self.extra)
        for spec in fields(self):
            body[spec.name] = getattr(self, spec.name)
        del body["extra"]
        body["format"] = _FRAMES_VERSION if self.is_compressed else FORMAT_VERSION
        body["files"] = [entry.to_json() for entry in self.files]
        if not self.interval:
            del body["interval"]
        for name in _TREES:
            if name in body:
                body[name] = tree.encode(dict(body[name]), path=("manifest", name))
        body["items"], body["notes"] = list(self.items), list(self.notes)
        return canonical.dump_record(body)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Manifest:
        """Open a manifest and check it.

        Args:
            data: The record.
            where: What it was read from, for messages.

        Raises:
            DamagedError: Torn or altered.
            NewerFormatError: Written by a newer version.
            FormatError: Whole, but not a manifest.
        """
        body = canonical.load_record(data, where=where, max_bytes=_MAX_MANIFEST_BYTES)
        version = body.pop("format", None)
        check_version(version, where=where, newest=_FRAMES_VERSION)
        known: dict[str, Any] = {}
        for spec in fields(cls):
            if spec.name in body:
                known[spec.name] = body.pop(spec.name)
        try:
            manifest = cls(**_read_fields(known, where), extra=body)
        except (TypeError, KeyError) as error:
            raise FormatError(f"{where} is not a manifest: {error}.", path=where) from error
        paths = [entry.path for entry in manifest.files]
        if len(set(paths)) != len(paths):
            raise FormatError(f"{where} lists a file twice.", path=where)
        if manifest.is_compressed and version < _FRAMES_VERSION:
            raise FormatError(f"{where} lists a compressed file in format {version}.", path=where)
        return manifest


def check_version(version: object, *, where: str, newest: int = FORMAT_VERSION) -> None:
    """Refuse what a newer version wrote.

    Args:
        version: The version that a record carries.
        where: What it was read from, for messages.
        newest: The newest one that is known of this kind of record.

    Raises:
        NewerFormatError: A higher format version.
        FormatError: No version at all.
    """
    if type(version) is not int or version < 1:
        raise FormatError(f"{where} carries no format version.", path=where)
    if version > newest:
        raise NewerFormatError(
            f"{where} is of format {version}; this Milepost reads up to {newest}.",
            hint="Upgrade with: pip install --upgrade milepost.",
            path=where,
            found=version,
            expected=newest,
        )


_TYPES: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "run_id": (str,),
    "session": (int,),
    "attempt": (int,),
    "write_id": (str,),
    "parent": (str, type(None)),
    "reason": (str,),
    "is_final": (bool,),
    "created_s": (int, float),
    "world_size": (int,),
    "layout": (str,),
    "items": (list,),
    "files": (list,),
    "notes": (list,),
    "time": (dict,),
    "metrics": (dict,),
    "software": (dict,),
    "stats": (dict,),
    "interval": (dict,),
}

_COUNTS: Mapping[str, int] = {"session": 0, "attempt": 0, "world_size": 1}
"""The whole numbers, and the least that each can be."""


def _read_fields(known: dict[str, Any], where: str) -> dict[str, Any]:
    for name, kinds in _TYPES.items():
        if name in known and type(known[name]) not in kinds:
            raise FormatError(f"{where}: the field {name} is of the wrong kind.", path=where)
    if len(known.get("files", ())) > _MAX_FILES:
        raise FormatError(f"{where} lists more than {_MAX_FILES:,} files.", path=where)
    for name in ("name", "parent"):  # become folder names: never a way out of the run
        if known.get(name) is not None:
            check_key(known[name], where=where)
    known["files"] = tuple(FileEntry.from_json(e, where=where) for e in known["files"])
    for name in ("items", "notes"):
        if not all(isinstance(text, str) for text in known.get(name, ())):
            raise FormatError(f"{where}: the field {name} is of the wrong kind.", path=where)
        known[name] = tuple(known.get(name, ()))
    for name in _TREES:
        known[name] = _read_mapping(known.get(name, {}), name, where)
    known.pop("extra", None)
    _check_numbers(known, where)
    return known


def _check_numbers(known: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that nobody could compute with: they are computed with wherever one looks."""
    is_right = {
        name: is_count(known[name], least=least) for name, least in _COUNTS.items() if name in known
    }
    if "created_s" in known:
        is_right["created_s"] = is_moment(known["created_s"])
    is_right["time"] = all(map(is_finite, known["time"].values()))
    for name in ("metrics", "stats", "interval"):
        is_right[name] = all(map(takes_float, known[name].values()))
    for name, is_so in is_right.items():
        if not is_so:
            raise FormatError(f"{where}: the field {name} is out of bounds.", path=where)


def _read_mapping(value: Any, name: str, where: str) -> dict[str, Any]:
    try:
        found = tree.decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: the field {name}: {error.what}", path=where) from error
    if type(found) is not dict:  # a tag that stands for something else
        raise FormatError(f"{where}: the field {name} is of the wrong kind.", path=where)
    return found
