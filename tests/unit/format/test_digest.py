"""Checksums of blocks and of whole files."""

from __future__ import annotations

import pytest

from milepost.format import digest


def crc_bit_by_bit(data: bytes) -> int:
    """CRC32C from its definition: the oracle."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_crc_is_castagnoli():
    """S3 and GCS compare with the same polynomial; the check value is the published one."""
    assert digest.crc32c(b"123456789") == 0xE3069283
    assert digest.crc32c(b"") == 0
    assert digest.crc32c(bytes(range(256))) == crc_bit_by_bit(bytes(range(256)))


def test_crc_goes_on_from_a_value():
    """Blocks are checked while they stream by."""
    assert digest.crc32c(b"6789", digest.crc32c(b"12345")) == 0xE3069283


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(bytearray(data))])
def test_crc_takes_every_kind_of_buffer(kind):
    """Staged memory is a memoryview; records are bytes."""
    assert digest.crc32c(kind(b"123456789")) == 0xE3069283
    assert digest.block_crcs(kind(b"123456789")) == [0xE3069283]


def test_buffer_of_wide_elements_is_checked_by_its_bytes():
    """A float array's view has fewer elements than bytes."""
    wide = memoryview(bytearray(b"12345678" * 4)).cast("d")
    assert digest.block_crcs(wide) == [crc_bit_by_bit(b"12345678" * 4)]


@pytest.mark.parametrize(
    ("size_bytes", "blocks"),
    [
        (0, 0),
        (1, 1),
        (digest.BLOCK_BYTES - 1, 1),
        (digest.BLOCK_BYTES, 1),
        (digest.BLOCK_BYTES + 1, 2),
        (3 * digest.BLOCK_BYTES, 3),
    ],
)
def test_file_crc_follows_from_its_blocks(size_bytes, blocks):
    """The object store's checksum of a whole file costs no second pass."""
    data = (b"milepost" * (size_bytes // 8 + 1))[:size_bytes]
    crcs = digest.block_crcs(data)
    assert len(crcs) == blocks == digest.block_count(size_bytes)
    assert digest.file_crc(crcs, size_bytes) == digest.crc32c(data)


def test_block_crcs_are_those_of_the_blocks():
    """A reader that fetches one block must be able to check it alone."""
    data = bytes(digest.BLOCK_BYTES) + b"tail"
    assert digest.block_crcs(data)[1] == crc_bit_by_bit(b"tail")
