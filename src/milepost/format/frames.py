"""How a compressed part is stored: one frame for each block of its plain bytes.

The manifest says of every frame how long it is and what its CRC32C is, and of every block what the
CRC32C of its plain bytes is. So a reader finds the frame of a block at once, trusts none that it
has not compared, and knows how much memory the plain bytes take before it decompresses any.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import FormatError
from .digest import BLOCK_BYTES, block_count, combine, crc32c
from .header import PAGE_BYTES

__all__ = ["CODEC", "FrameSums", "Frames", "padded"]

CODEC = "blosc2"

_MAX_BYTES = 2**60
_CRCS = re.compile(r"(?:[0-9a-f]{8})*")


def padded(length: int) -> int:
    """Return how far behind a frame the next one begins."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one file.

    Attributes:
        size_bytes: Size of the plain bytes.
        crcs: CRC32C of each block of the plain bytes.
        lengths: Bytes of each frame; as many as its block has where that is stored as it is.
        frame_crcs: CRC32C of each frame.
    """

    size_bytes: int
    crcs: tuple[int, ...]
    lengths: tuple[int, ...]
    frame_crcs: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Return the size of the stored file."""
        return sum(map(padded, self.lengths[:-1])) + sum(self.lengths[-1:])

    def block_bytes(self, block: int) -> int:
        """Return how many plain bytes a block has."""
        return min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)

    def is_length(self, block: int, length: object) -> bool:
        """Return whether the frame of a block may have a length."""
        return type(length) is int and 0 < length <= self.block_bytes(block)

    def starts(self) -> list[int]:
        """Return where each frame begins in the stored file."""
        return list(accumulate(map(padded, self.lengths[:-1]), initial=0))

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON."""
        return {
            "codec": CODEC,
            "size": self.size_bytes,
            "crc32c": _hex(self.crcs),
            "lengths": list(self.lengths),
            "frame_crc32c": _hex(self.frame_crcs),
        }

    @classmethod
    def from_json(cls, value: Any, *, stored_bytes: int, where: str, path: str) -> Frames:
        """Read the frames of a file and check them.

        Args:
            value: The JSON.
            stored_bytes: Size of the stored file.
            where: What it was read from, for messages.
            path: The file, for messages.

        Raises:
            FormatError: They do not fit each other, or not into the file.
        """

        def refuse(why: str) -> FormatError:
            return FormatError(f"{where} describes frames of {path} {why}.", path=where)

        if type(value) is not dict:
            raise refuse("in a malformed way")
        size, lengths = value.get("size"), value.get("lengths")
        crcs, frame_crcs = value.get("crc32c"), value.get("frame_crc32c")
        if value.get("codec") != CODEC:
            raise refuse(f"of an unknown codec {str(value.get('codec'))[:20]!r}")
        if type(size) is not int or not 0 < size <= _MAX_BYTES:
            raise refuse("with an impossible size")
        if type(lengths) is not list or len(lengths) != block_count(size):
            raise refuse("whose number is not that of the blocks")
        for text in (crcs, frame_crcs):
            if type(text) is not str or len(text) != 8 * len(lengths) or not _CRCS.fullmatch(text):
                raise refuse("with malformed checksums")
        frames = cls(size, _crcs(crcs), tuple(lengths), _crcs(frame_crcs))
        if not all(map(frames.is_length, range(len(lengths)), lengths)):
            raise refuse("with an impossible length")
        if frames.stored_bytes != stored_bytes:
            raise refuse("that do not fill it")
        return frames


class FrameSums:
    """The checksums of the frames in a stored file whose blocks come in any order.

    Threads may bring blocks at once.

    Args:
        frames: What the manifest says of them.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._starts = frames.starts()
        self._seen: list[list[tuple[int, int, int]]] = [[] for _ in self._starts]

    def add(self, block: int, data: memoryview) -> None:
        """Take in a block of the stored file."""
        low, high = block * BLOCK_BYTES, block * BLOCK_BYTES + len(data)
        frame = bisect_right(self._starts, low) - 1
        while frame < len(self._starts) and self._starts[frame] < high:
            start = max(self._starts[frame], low)
            stop = min(self._starts[frame] + self._frames.lengths[frame], high)
            if start < stop:
                crc = crc32c(data[start - low : stop - low])
                self._seen[frame].append((start, stop - start, crc))
            frame += 1

    def wrong(self) -> list[tuple[int, int]]:
        """Return the frames with another checksum than they should have, and which.

        Those that did not come in whole are left out.
        """
        found = []
        for frame, seen in enumerate(self._seen):
            crc = 0
            for _, length, of_piece in sorted(seen):
                crc = combine(crc, of_piece, length)
            is_whole = sum(length for _, length, _ in seen) == self._frames.lengths[frame]
            if is_whole and crc != self._frames.frame_crcs[frame]:
                found.append((frame, crc))
        return found


def _hex(crcs: tuple[int, ...]) -> str:
    return "".join(f"{crc:08x}" for crc in crcs)


def _crcs(text: Any) -> tuple[int, ...]:
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
