"""Memory for direct I/O."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from milepost.format.digest import BLOCK_BYTES
from milepost.stores.pages import page_memory

MAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> set[str]:
    """Return the flags of the mapping that an address is in."""
    is_inside = False
    for line in MAPS.read_text().splitlines():
        field, _, rest = line.partition(" ")
        if not field.endswith(":"):
            start, stop = (int(border, 16) for border in field.split("-"))
            is_inside = start <= address < stop
        elif is_inside and field == "VmFlags:":
            return set(rest.split())
    pytest.skip("this kernel does not tell the flags of a mapping")


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list its mappings")
@pytest.mark.parametrize(("num_bytes", "is_large"), [(BLOCK_BYTES, True), (64 * 1024, False)])
def test_blocks_lie_in_huge_pages_that_no_child_gets(num_bytes, is_large):
    """A device takes a request in a few pieces then; small memory would waste most of a page."""
    memory = page_memory(num_bytes)
    found = flags_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if is_large and "hg" not in found and not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    assert ("hg" in found, "dc" in found) == (is_large, True)
