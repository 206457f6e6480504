"""Forked children of a process that talks to a bucket, such as the workers of a loader."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from milepost.errors import UsageError
from milepost.stores import forked

from ..servers import Server

pytestmark = pytest.mark.cloud
CHILD_S = 30


@dataclass
class Circle:
    """Garbage that only a collection finds."""

    content: object
    itself: object = None

    def __post_init__(self) -> None:
        self.itself = self


def in_child(check) -> int:
    """Run something in a forked child; return how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + CHILD_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["moto", "gcs", "azurite"])
def test_a_client_is_not_dropped_in_a_child(name: str, request: pytest.FixtureRequest) -> None:
    """Its locks may be held by threads that are not there. In the parent it is dropped as ever."""
    server: Server = request.getfixturevalue(name)
    with no_collection():
        store = server.open("forked/a")
        client = store._clients.get("read")
        number = id(client)
        assert number in forked._alive
        del client
        Circle(store)
        del store
        count = ctypes.c_ssize_t.from_address(number)

        def is_there() -> bool:
            gc.collect()
            return count.value > 0 and number in forked._alive

        assert in_child(is_there) == 0
        assert number in forked._alive
        gc.collect()
        assert number not in forked._alive
        assert forked._held == []


def test_a_child_opens_no_store_where_its_parent_has_talked(
    moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request would wait for ever, for threads that are not there. One of a silent parent may."""
    moto.open("forked/c").put("a", b"1")

    def is_refused() -> bool:
        try:
            moto.open("forked/c").get("a")
        except UsageError as error:
            return "spawn" in str(error.hint)
        return False

    assert in_child(is_refused) == 0
    monkeypatch.setattr(forked._Threads, "have_begun", False)
    assert in_child(lambda: bool(moto.open("forked/c"))) == 0


class Numbers(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.campaign
def test_workers_of_loaders_begin_while_requests_are_under_way(moto: Server) -> None:
    """Each is forked at some moment of them, and has clients to collect that were left before."""
    is_over, errors = threading.Event(), []

    def ask() -> None:
        store = moto.open(f"forked/{threading.get_ident()}")
        try:
            while not is_over.is_set():
                store.put("a", b"1" * 1000)
                list(store.list())
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    torch.set_num_threads(1)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, timeout=CHILD_S)
    try:
        deadline_s = time.monotonic() + 50
        while time.monotonic() < deadline_s:
            store = moto.open("forked/b")
            store.put("a", b"1")
            Circle(store)
            del store
            assert sum(len(batch) for batch in loader) == 40
    finally:
        is_over.set()
        for thread in threads:
            thread.join(CHILD_S)
    assert not errors
