"""CRC32C of blocks, and combining them into a file's.

A file is checked in blocks of ``BLOCK_BYTES``: that is the unit that a reader must fetch to trust
any byte in it, and the unit that an error message can name. The CRC of a whole file follows from
those of its blocks without a second pass, and is the one that S3 and GCS speak.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from crc32c import crc32c as _crc32c

__all__ = ["BLOCK_BYTES", "block_count", "block_crcs", "combine", "crc32c", "file_crc"]

BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes of a file that share one checksum."""

Buffer = bytes | bytearray | memoryview

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the CRC32C of ``data``, going on from ``value``. Large buffers release the GIL."""
    return int(_crc32c(data, value))


def block_count(size_bytes: int) -> int:
    """Return how many blocks a file of ``size_bytes`` has."""
    return -(-size_bytes // BLOCK_BYTES)


def block_crcs(data: Buffer) -> list[int]:
    """Return the CRC32C of each block of a file held in memory."""
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    return [crc32c(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC of ``A + B`` from the CRCs of A and B and the length of B in bytes.

    Source:
        The matrix form of appending zeros used by zlib's ``crc32_combine``, for Castagnoli.
    """
    value = first
    for operator in _zero_operators(second_bytes):
        value = _apply(operator, value)
    return value ^ second


def file_crc(crcs: Iterable[int], size_bytes: int) -> int:
    """Return the CRC32C of a whole file from those of its blocks."""
    total, left = 0, size_bytes
    for crc in crcs:
        length = min(BLOCK_BYTES, left)
        total = combine(total, crc, length)
        left -= length
    return total


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    result, row = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[row]
        vector >>= 1
        row += 1
    return result


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(matrix, row) for row in matrix)


@lru_cache(maxsize=64)
def _zero_operators(num_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return the operators that append ``num_bytes`` zero bytes, one per set bit."""
    bit = (_POLYNOMIAL, *(1 << row for row in range(31)))
    operator = _square(_square(_square(bit)))  # 8 zero bits = 1 zero byte
    operators = []
    while num_bytes:
        if num_bytes & 1:
            operators.append(operator)
        num_bytes >>= 1
        operator = _square(operator)
    return tuple(operators)
