"""Many records at once: the answers are those of a plain loop."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from milepost.runs.parallel import each
from milepost.stores import MemoryStore

WAIT_S = 30


@pytest.fixture(params=["remote", "local"])
def store(request):
    store = MemoryStore("run")
    store.traits = replace(store.traits, is_local=request.param == "local")
    return store


@pytest.mark.parametrize("count", [0, 1, 4, 5, 16, 17, 1000])
def test_answers_come_in_the_order_of_the_items(store, count):
    """Whoever is quicker."""
    assert each(store, lambda one: one * one, range(count)) == [n * n for n in range(count)]


def test_requests_wait_together_but_not_all_of_them():
    """Sixteen at a time: no more sockets and threads, however many records there are."""
    barrier, lock = threading.Barrier(16), threading.Lock()
    now, most = 0, 0

    def wait(_: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(now, most)
        barrier.wait(WAIT_S)  # only sixteen at once come over this
        with lock:
            now -= 1

    each(MemoryStore("run"), wait, range(160))
    assert most == 16


def test_files_and_a_few_records_are_looked_at_in_turn():
    """Threads would cost more than they save."""
    store, caller = MemoryStore("run"), threading.get_ident()
    assert {*each(store, lambda _: threading.get_ident(), range(4))} == {caller}
    store.traits = replace(store.traits, is_local=True)
    assert {*each(store, lambda _: threading.get_ident(), range(100))} == {caller}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_others(store, kind):
    """It is raised as it is, no thread is left, and what was not begun is not begun."""
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        if number == 7:
            raise kind("seven")

    before = threading.active_count()
    with pytest.raises(kind, match="seven"):
        each(store, fail, range(100_000))
    assert threading.active_count() == before
    assert len(begun) < 100_000
