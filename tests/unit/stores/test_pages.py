"""Memory for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
import os
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
def test_blocks_lie_in_huge_pages_that_are_empty_in_a_child(num_bytes, is_large):
    """A device takes a request in a few pieces then; small memory would waste most of a page."""
    memory = page_memory(num_bytes)
    found = flags_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if is_large and "hg" not in found and not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    assert ("hg" in found, "wf" in found) == (is_large, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("num_bytes", [64 * 1024, BLOCK_BYTES])
def test_a_child_that_drops_the_memory_of_its_parent_unmaps_nothing_else(num_bytes):
    """What it maps itself must not lie there: the batch that a worker was filling went away."""
    memory = page_memory(num_bytes)
    memory[:6] = b"parent"
    child = os.fork()
    if child == 0:
        is_empty = memory[:6] == bytes(6)
        own = [mmap.mmap(-1, num_bytes) for _ in range(8)]
        del memory  # as the collector would, at any time
        for number, one in enumerate(own):
            one[:] = bytes([number]) * num_bytes  # which ends the child where nothing is mapped
        is_right = all(one[:] == bytes([n]) * num_bytes for n, one in enumerate(own))
        os._exit(0 if is_empty and is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[:6] == b"parent"
