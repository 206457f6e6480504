"""Read files that ``torch.save`` wrote: ``.pt``, ``.pth``, ``.torch``, plain or compressed.

Such a file holds a pickle, and a pickle can run code. Unless the caller says ``trust=True``, only
tensors, plain containers, numbers, text, and NumPy arrays and scalars of plain types are taken;
anything else is refused before it is built. What expands out of all proportion is refused too.
"""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import os
import pickle
import re
import tempfile
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import torch

from ..errors import (
    CheckpointError,
    FormatError,
    MissingError,
    UnsupportedStateError,
    storage_error,
)
from ..state.source import MemorySource
from ..stores.posix import expanded
from .layouts import items_of
from .numpy_data import STAND_INS, settle

__all__ = ["items_of", "load_torch_file", "torch_file_source"]

_log = logging.getLogger("milepost")

_MAX_RATIO = 1000
_MAX_FREE_BYTES = 1 << 30
"""A file may always expand to this size, and beyond it to ``_MAX_RATIO`` times its own."""


def _open_xz(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, lzma.LZMAFile(file))


_COMPRESSIONS: tuple[tuple[bytes, Callable[[BinaryIO], BinaryIO]], ...] = (
    (b"\x1f\x8b", lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file))),
    (b"BZh", lambda file: cast(BinaryIO, bz2.BZ2File(file))),
    (b"\xfd7zXZ\x00", _open_xz),
)

_REFUSED = re.compile(
    r"(?:unsupported (?:global: )?(?:GLOBAL|class)|Can only build .* but got <class) '?([\w.<>]+)",
    re.IGNORECASE,
)

_ALLOWED: list[Any] = [Counter, OrderedDict, frozenset, dict, list, tuple, *STAND_INS]
"""What a file may hold beyond torch's own list of plain data."""


def load_torch_file(file: str | os.PathLike[str] | BinaryIO, *, trust: bool = False) -> Any:
    """Read what ``torch.save`` wrote, with every tensor on the CPU.

    gzip, bzip2 and xz are recognised by the first bytes of the file, whatever its name.

    Args:
        file: Path, or a file opened for reading bytes that can seek.
        trust: Whether the file may run code while it is read. Only for files you made yourself.

    Returns:
        The value as it was saved.

    Raises:
        MissingError: No such file.
        AccessError: The file may not be read.
        UnsupportedStateError: The file holds code or classes, and ``trust`` is false.
        FormatError: Not such a file, damaged, or expanding out of all proportion.
    """
    if trust:
        _log.warning("Reading %s with trust=True: code in the file will run.", _name_of(file))
    if isinstance(file, str | os.PathLike):
        path = expanded(file)
        try:
            with path.open("rb") as opened:
                return _load(opened, str(path), trust=trust)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, operation="read", path=str(path)) from error
    return _load(file, _name_of(file), trust=trust)


def torch_file_source(path: str | os.PathLike[str], *, trust: bool = False) -> MemorySource:
    """Read a ``.pt`` file as a state that objects can be restored from.

    See :func:`items_of` for the layouts that are understood, and for when the state of an optimizer
    that is numbered by position gets the names of the model's parameters.

    Args:
        path: The file.
        trust: Whether the file may run code while it is read.

    Raises:
        MissingError: No such file.
        UnsupportedStateError: The file holds code or classes, and ``trust`` is false.
        FormatError: Not such a file, or none of the known layouts.
    """
    value = load_torch_file(path, trust=trust)
    return MemorySource(str(path), items_of(value))


def _name_of(file: str | os.PathLike[str] | BinaryIO) -> str:
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    return str(getattr(file, "name", "The file"))


def _load(file: BinaryIO, name: str, *, trust: bool) -> Any:
    start = file.tell()
    magic = file.read(6)
    file.seek(0, io.SEEK_END)
    num_bytes = file.tell() - start
    file.seek(start)
    if not magic:
        raise FormatError(f"{name} is empty.", path=name)
    limit_bytes = max(_MAX_FREE_BYTES, _MAX_RATIO * num_bytes)
    for prefix, open_stream in _COMPRESSIONS:
        if magic.startswith(prefix):
            with tempfile.TemporaryFile() as plain:
                _expand(open_stream(file), cast(BinaryIO, plain), name, limit_bytes)
                return _unpickle(cast(BinaryIO, plain), name, limit_bytes, trust=trust)
    return _unpickle(file, name, limit_bytes, trust=trust)


def _expand(stream: BinaryIO, target: BinaryIO, name: str, limit_bytes: int) -> None:
    num_bytes = 0
    try:
        with stream:
            while block := stream.read(1 << 20):
                num_bytes += len(block)
                if num_bytes > limit_bytes:
                    raise _too_large(name, limit_bytes)
                target.write(block)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise FormatError(f"{name} is damaged: {error}.", path=name) from error
    except OSError as error:
        # bz2 reports damaged data as an OSError without a number.
        if error.errno is not None:
            raise
        raise FormatError(f"{name} is damaged: {error}.", path=name) from error
    target.seek(0)


def _unpickle(file: BinaryIO, name: str, limit_bytes: int, *, trust: bool) -> Any:
    _check_archive(file, name, limit_bytes)
    try:
        if trust:
            return torch.load(file, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_ALLOWED):
            return settle(torch.load(file, map_location="cpu", weights_only=True))
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # Damaged or hostile bytes surface as almost any exception of the interpreter's.
        raise _reading_error(error, name, trust=trust) from error


def _check_archive(file: BinaryIO, name: str, limit_bytes: int) -> None:
    """Refuse an archive whose members expand out of all proportion."""
    start = file.tell()
    try:
        if not zipfile.is_zipfile(file):
            return
        file.seek(start)
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise FormatError(f"{name} is a damaged archive: {error}.", path=name) from error
    finally:
        file.seek(start)
    if num_bytes > limit_bytes:
        raise _too_large(name, limit_bytes)


def _too_large(name: str, limit_bytes: int) -> FormatError:
    return FormatError(
        f"{name} expands to more than {limit_bytes} bytes, out of all proportion to its size.",
        safe="Nothing was loaded.",
        hint="If the file is yours, unpack it first and load what is inside.",
        path=name,
    )


def _reading_error(error: Exception, name: str, *, trust: bool) -> CheckpointError:
    text = str(error)
    refused = _REFUSED.search(text)
    if not trust and isinstance(error, pickle.UnpicklingError) and refused is not None:
        return UnsupportedStateError(
            f"{name} holds more than data: it wants to build {refused[1]}.",
            safe="Nothing of it was run.",
            hint="Load it with trust=True only if you made the file yourself.",
            path=name,
            refused=refused[1],
        )
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{name} is not there.", path=name)
    reason = _first_reason(text) or type(error).__name__
    return FormatError(
        f"{name} is not a file that torch.save wrote, or it is damaged: {reason}",
        hint="Compare its size and checksum with the original.",
        path=name,
    )


def _first_reason(text: str) -> str:
    """Return the line of torch's long message that says what is wrong."""
    tail = text.rsplit("WeightsUnpickler error:", 1)[-1]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[0].split(". ")[0][:300].rstrip(".") + "." if lines else ""
