"""Is a checkpoint whole? Quickly, by its records and sizes, or fully, by every byte.

Quick: the seal of the manifest, every file with its exact size, the checksums of the JSON files,
and the header of every part. It costs a few small reads per file and finds what crashes and
half-done copies leave behind. Full: the CRC32C of every block of every file as well, which finds a
single flipped bit and names the file, the block and the tensors that it lies in. Of a compressed
file the frames are compared as well: what was altered in memory before it was written has the right
checksum as it is stored, and cannot be loaded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

from ..errors import CheckpointError, FormatError, MissingError, StorageError
from ..format.digest import BLOCK_BYTES, block_crcs
from ..format.frames import FrameSums
from ..format.header import PAGE_BYTES, StoredTable, StoredTensor, parse_header, parse_header_length
from ..format.layout import MANIFEST
from ..format.manifest import FileEntry, Manifest
from ..frames.codec import is_loadable
from ..frames.reader import open_plain
from ..stores.again import read_twice
from ..stores.base import Reader, Store
from ..stores.pages import page_memory
from .damage import raise_unreachable
from .folders import file_key, is_diagnostic
from .manifests import read_manifest
from .scan import Found, RunView, State

__all__ = ["Level", "Problem", "VerifyReport", "newest_good", "verify", "verify_files"]

_NUM_THREADS = 2
_MAX_SMALL_BYTES = 64 * 1024 * 1024
_MAX_NAMED_TENSORS = 20

Progress = Callable[[int], None]


class Level(str, Enum):
    """How closely to look."""

    QUICK = "quick"
    FULL = "full"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        path: The file, relative to the checkpoint's folder.
        block: Number of the block of 8 MiB, or ``None`` if it is about the whole file.
        expected: What should be there: a size in bytes, or a checksum in hex.
        found: What is there.
        text: All of it in a sentence.
        tensors: Names of the tensors that the block holds bytes of, where they are known.
    """

    path: str
    block: int | None
    expected: str
    found: str
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a look at one checkpoint has shown.

    Attributes:
        name: The checkpoint.
        level: How closely it was looked at.
        problems: What is wrong, by file; empty if it is whole.
        checked_bytes: How many bytes were read and compared with their checksum.
    """

    name: str
    level: Level
    problems: tuple[Problem, ...]
    checked_bytes: int

    @property
    def is_good(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems


def verify(
    store: Store,
    name: str,
    level: Level | str = Level.QUICK,
    *,
    progress: Progress | None = None,
) -> VerifyReport:
    """Look whether a checkpoint is whole.

    Args:
        store: The run's store.
        name: The checkpoint's folder; ``""`` if the store stands in it.
        level: ``quick`` or ``full``.
        progress: Called with the bytes of each block that was compared, by several threads.

    Raises:
        MissingError: There is no commit in the folder, or there is none any more.
        NewerFormatError: A newer Milepost wrote it.
        AccessError: The store refused a read, which says nothing about the bytes.
        StorageError: A store that is not of this machine cannot be reached.
    """
    level = Level(level)
    try:
        manifest = read_manifest(store, name)
    except (FormatError, StorageError) as error:
        raise_unreachable(store, error)
        if error.kind == "newer_format":
            raise
        return VerifyReport(name, level, (_unreadable(MANIFEST, error),), 0)
    problems: list[Problem] = []
    sound: list[FileEntry] = []
    checked_bytes = 0
    for entry in manifest.files:
        problem = _check_size(store, name, entry)
        if problem is not None:
            problems.append(problem)
            continue
        sound.append(entry)
        if level is Level.QUICK:
            problems += _check_lightly(store, name, entry, manifest)
            checked_bytes += entry.size_bytes * _is_small_json(entry)
    if level is Level.FULL:
        problems += verify_files(store, name, manifest, sound, progress=progress)
        checked_bytes = sum(entry.size_bytes for entry in sound)
    if problems:
        _refuse_deleted(store, name)
    return VerifyReport(name, level, tuple(problems), checked_bytes)


def newest_good(
    store: Store, view: RunView, *, level: Level | str = Level.QUICK
) -> tuple[Found | None, list[VerifyReport]]:
    """Return the newest checkpoint on the lineage that is whole.

    Args:
        store: The run's store.
        view: The run.
        level: How closely to look.

    Returns:
        The checkpoint, or ``None`` if none is whole, and a report on every newer one that is not,
        the newest first; those whose commit cannot be read are among them.
    """
    reports = []
    readable = (State.COMMITTED, State.DAMAGED)
    for found in reversed(view.found):
        if found.state not in readable or is_diagnostic(found.name):
            continue
        if found.state is State.DAMAGED:
            reports.append(_report_damaged(found, Level(level)))
            continue
        try:
            report = verify(store, found.name, level)
        except MissingError as error:  # deleted since the scan
            report = VerifyReport(found.name, Level(level), (_unreadable(MANIFEST, error),), 0)
        if report.is_good:
            return found, reports
        reports.append(report)
    return None, reports


def _refuse_deleted(store: Store, name: str) -> None:
    """Tell damage from a deletion that began while we looked."""
    try:
        store.head(file_key(name, MANIFEST))
    except MissingError as error:
        raise MissingError(
            f"{name} was deleted while it was looked at.",
            hint="Look at a newer checkpoint.",
            name=name,
        ) from error


def _report_damaged(found: Found, level: Level) -> VerifyReport:
    error = found.error or FormatError(f"The commit of {found.name} cannot be read.")
    return VerifyReport(found.name, level, (_unreadable(MANIFEST, error),), 0)


def _unreadable(path: str, error: CheckpointError) -> Problem:
    return Problem(path, None, "", "", str(error))


def _check_size(store: Store, name: str, entry: FileEntry) -> Problem | None:
    try:
        found = store.head(file_key(name, entry.path)).size_bytes
    except MissingError:
        path = store.local_path(file_key(name, entry.path))
        if path is not None and Path(path).is_symlink():
            text = f"{entry.path} is a symbolic link, and links are not followed."
            return Problem(entry.path, None, str(entry.size_bytes), "symbolic link", text)
        text = f"{entry.path} is missing."
        return Problem(entry.path, None, str(entry.size_bytes), "missing", text)
    except StorageError as error:
        raise_unreachable(store, error)
        return _unreadable(entry.path, error)
    if found == entry.size_bytes:
        return None
    text = f"{entry.path} has {found:,} bytes and not {entry.size_bytes:,}."
    return Problem(entry.path, None, str(entry.size_bytes), str(found), text)


def _is_small_json(entry: FileEntry) -> bool:
    return entry.path.endswith(".json") and entry.size_bytes <= _MAX_SMALL_BYTES


def _is_part(entry: FileEntry, manifest: Manifest) -> bool:
    """Return whether a file is a part of ours; a user's own file may bear any name."""
    return manifest.layout == "milepost" and entry.path.endswith(".safetensors")


def _check_lightly(
    store: Store, name: str, entry: FileEntry, manifest: Manifest
) -> Iterator[Problem]:
    key = file_key(name, entry.path)
    try:
        if _is_small_json(entry):
            found = block_crcs(store.get(key))
            for block, (crc, expected) in enumerate(zip(found, entry.crcs, strict=False)):
                if crc != expected:
                    yield _mismatch(entry, block, crc, ())
        elif _is_part(entry, manifest) and (entry.frames is None or is_loadable()):
            with closing(open_plain(store, key, entry)) as reader:
                _read_header(reader, entry.plain)
    except (MissingError, FormatError, StorageError) as error:
        raise_unreachable(store, error)
        yield _unreadable(entry.path, error)


def _read_header(reader: Reader, entry: FileEntry) -> StoredTable:
    """Return the table of tensors of a part."""
    size_bytes = entry.size_bytes
    view = _pages(min(PAGE_BYTES, size_bytes))
    reader.read_into(0, view)
    length = parse_header_length(bytes(view[:8]), size_bytes=size_bytes, where=entry.path)
    view = _pages(8 + length)
    reader.read_into(0, view)
    return parse_header(bytes(view[8:]), size_bytes=size_bytes, where=entry.path)


def _pages(size_bytes: int) -> memoryview:
    """Return page-aligned memory of a size.

    It is freed with its last user and not by hand: the traceback of an error may hold a slice.
    """
    return memoryview(page_memory(size_bytes))[:size_bytes]


def verify_files(
    store: Store,
    name: str,
    manifest: Manifest,
    entries: Sequence[FileEntry],
    *,
    progress: Progress | None = None,
) -> list[Problem]:
    """Compare every block of some files of a checkpoint with its checksum, several at a time.

    Args:
        store: The run's store.
        name: The checkpoint's folder; ``""`` if the store stands in it.
        manifest: Its commit, which need not be in the store.
        entries: The files; each has its right size.
        progress: Called with the bytes of each block that was compared, by several threads.
    """
    if not entries:
        return []
    problems: list[Problem] = []
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_NUM_THREADS):
        buffers.put(_pages(BLOCK_BYTES))
    note = progress or (lambda _: None)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="milepost-verify") as pool:
        for entry in entries:
            problems += _check_file(store, name, entry, manifest, pool, buffers, note)
    return problems


def _check_file(
    store: Store,
    name: str,
    entry: FileEntry,
    manifest: Manifest,
    pool: ThreadPoolExecutor,
    buffers: SimpleQueue[memoryview],
    note: Progress,
) -> list[Problem]:
    try:
        reader = store.open_reader(file_key(name, entry.path))
    except (MissingError, FormatError, StorageError) as error:
        raise_unreachable(store, error)
        return [_unreadable(entry.path, error)]

    sums = FrameSums(entry.frames) if entry.frames is not None else None

    def check(block: int) -> tuple[int, int | CheckpointError]:
        offset = block * BLOCK_BYTES
        pages = buffers.get()
        try:
            view = pages[: min(BLOCK_BYTES, entry.size_bytes - offset)]
            found = read_twice(reader, offset, view, expected=entry.crcs[block])
            if sums is not None and found == entry.crcs[block]:
                sums.add(block, view)
            note(view.nbytes)
            return block, found
        except (FormatError, StorageError) as error:
            raise_unreachable(store, error)
            return block, error
        finally:
            buffers.put(pages)

    with closing(reader):
        outcomes = list(pool.map(check, range(len(entry.crcs))))
        bad = [(block, got) for block, got in outcomes if got != entry.crcs[block]]
    wrong = sums.wrong() if sums is not None else []
    tensors: list[StoredTensor] = []
    if (bad or wrong) and _is_part(entry, manifest):
        tensors = _tensors(store, file_key(name, entry.path), entry)
    problems = []
    for block, got in bad:
        names = _names_in(tensors, *_plain_range(entry, block))
        if isinstance(got, int):
            problems.append(_mismatch(entry, block, got, names))
        else:
            text = f"Block {block} of {entry.path} cannot be read: {got}"
            problems.append(Problem(entry.path, block, "", "", text, names))
    for frame, got in wrong:
        names = _names_in(tensors, frame * BLOCK_BYTES, (frame + 1) * BLOCK_BYTES)
        problems.append(_wrong_frame(entry, frame, got, names))
    return problems


def _tensors(store: Store, key: str, entry: FileEntry) -> list[StoredTensor]:
    """Return the tensors of a part, or none if its own header is not to be trusted."""
    if entry.frames is not None and not is_loadable():
        return []
    plain = entry.plain
    try:
        with closing(open_plain(store, key, entry)) as reader:
            first = _pages(min(BLOCK_BYTES, plain.size_bytes))
            if read_twice(reader, 0, first, expected=plain.crcs[0]) != plain.crcs[0]:
                return []
            return list(_read_header(reader, plain).values())
    except (MissingError, FormatError, StorageError):
        # The problem itself is already known by its block; only the names are not.
        return []


def _plain_range(entry: FileEntry, block: int) -> tuple[int, int]:
    """Return which plain bytes of a file lie in a block of it as it is stored."""
    start, stop = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
    if entry.frames is None:
        return start, stop
    starts = entry.frames.starts()
    return (bisect_right(starts, start) - 1) * BLOCK_BYTES, bisect_left(starts, stop) * BLOCK_BYTES


def _names_in(tensors: list[StoredTensor], start: int, stop: int) -> tuple[str, ...]:
    return tuple(sorted(one.key for one in tensors if one.start < stop and one.stop > start))


def _mismatch(entry: FileEntry, block: int, crc: int, tensors: tuple[str, ...]) -> Problem:
    what = f"Block {block} of {entry.path}"
    return _other_sum(entry, what, block, crc=crc, expected=entry.crcs[block], tensors=tensors)


def _wrong_frame(entry: FileEntry, frame: int, crc: int, tensors: tuple[str, ...]) -> Problem:
    """Return what is wrong with a frame in blocks that are as they were written."""
    assert entry.frames is not None
    block = entry.frames.starts()[frame] // BLOCK_BYTES
    what, expected = f"Frame {frame} of {entry.path}", entry.frames.frame_crcs[frame]
    return _other_sum(entry, what, block, crc=crc, expected=expected, tensors=tensors)


def _other_sum(
    entry: FileEntry, what: str, block: int, *, crc: int, expected: int, tensors: tuple[str, ...]
) -> Problem:
    right, found = f"{expected:08x}", f"{crc:08x}"
    names = ", ".join(tensors[:_MAX_NAMED_TENSORS])
    more = f" and {len(tensors) - _MAX_NAMED_TENSORS} more" * (len(tensors) > _MAX_NAMED_TENSORS)
    where = f" It holds bytes of {names}{more}." if tensors else ""
    text = f"{what} has CRC32C {found} and not {right}.{where}"
    return Problem(entry.path, block, right, found, text, tensors)
