"""What measuring a place does there, by a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from milepost.errors import AccessError, UsageError
from milepost.measuring.limits import FolderLimits, StoreLimits
from milepost.measuring.place import measure_place
from milepost.stores import MemoryStore

MIB = 1024 * 1024


class Ticks:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self, stop_at: int | None = None):
        self.now_s = 0
        self.stop_at = stop_at

    def __call__(self) -> float:
        assert threading.current_thread() is threading.main_thread()
        self.now_s += 1
        if self.now_s == self.stop_at:
            raise KeyboardInterrupt
        return float(self.now_s)


def test_what_is_measured_is_what_the_clock_says_and_nothing_is_left(tmp_path):
    """Each step lies between two looks at the clock; a save has one more look in the middle."""
    found = measure_place(tmp_path / "a" / "b", probe_bytes=16 * MIB, seconds=60, clock=Ticks())
    assert list(tmp_path.iterdir()) == []
    assert found.url == str(tmp_path / "a" / "b")
    assert found.num_rounds >= 2
    assert found.took_s >= 60
    limits = found.limits
    assert {limits.copy_bytes_s, limits.write_bytes_s, limits.read_bytes_s} == {16.0 * MIB}
    assert (limits.sync_s, limits.put_s, limits.get_s) == (1.0, None, None)
    for state, size_bytes in ((found.small, 65536), (found.large, 16 * MIB)):
        assert state.size_bytes == size_bytes
        assert (state.blocking_s, state.durable_s, state.load_s) == (1.0, 2.0, 1.0)


def test_a_slow_place_gets_a_smaller_probe(tmp_path):
    """16 MiB a second, and half a minute: what is written several times must not take longer."""
    found = measure_place(tmp_path, probe_bytes=1024 * MIB, seconds=24, clock=Ticks())
    assert found.large.size_bytes == 32 * MIB


@pytest.mark.parametrize("stop_at", [2, 5, 9, 15])
def test_nothing_is_left_after_ctrl_c(tmp_path, stop_at):
    """Wherever it comes."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(KeyboardInterrupt):
        measure_place(tmp_path, probe_bytes=16 * MIB, seconds=60, clock=Ticks(stop_at))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_refuses_is_an_error(tmp_path):
    """Nothing can be measured where nothing can be written."""
    with pytest.raises((AccessError, OSError)):
        measure_place("/proc/none", probe_bytes=16 * MIB, seconds=1)
    with pytest.raises(UsageError):
        measure_place(tmp_path, probe_bytes=1000, seconds=1)


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_the_limit_moves_every_byte(tmp_path, kind):
    """A limit that wrote less than it says would make Milepost look slow."""
    size_bytes = 17 * MIB + 5
    store = MemoryStore("limits")
    limits = FolderLimits(tmp_path) if kind == "folder" else StoreLimits(store)
    limits.write_s(size_bytes, Ticks())
    if kind == "folder":
        assert (tmp_path / "limit.bin").stat().st_size == size_bytes
        assert set(limits.small_s(Ticks())) == {"sync_s", "link_s"}
    else:
        assert sum(entry.size_bytes for entry in store.list()) >= size_bytes
        assert set(limits.small_s(Ticks())) == {"put_s", "get_s"}
    limits.read_s(size_bytes, Ticks())
    limits.clear()
    assert not list(store.list())
    assert not list(tmp_path.iterdir())
