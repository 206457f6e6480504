"""Laws of checksums."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from milepost.format import digest


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_is_concatenation(first, second):
    """combine(crc(A), crc(B), len(B)) is crc(A + B), for every split."""
    combined = digest.combine(crc32c(first), crc32c(second), len(second))
    assert combined == crc32c(first + second)


@given(st.binary(max_size=50), st.integers(0, 5_000_000))
def test_combine_holds_for_long_tails(first, length):
    """The lengths that matter are megabytes, not the handful of bytes of the law above."""
    second = bytes(length)
    combined = digest.combine(crc32c(first), crc32c(second), length)
    assert combined == crc32c(first + second)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
)
def test_combine_is_associative(a, b, c, b_bytes, c_bytes):
    """Blocks may be joined in any grouping, also far beyond what memory could hold."""
    left = digest.combine(digest.combine(a, b, b_bytes), c, c_bytes)
    right = digest.combine(a, digest.combine(b, c, c_bytes), b_bytes + c_bytes)
    assert left == right
