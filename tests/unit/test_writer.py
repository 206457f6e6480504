"""What a save costs its run, and what the retention of a session makes sure of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from milepost.engine.save import SaveRequest
from milepost.opening import WriterOptions
from milepost.runs import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    delete_checkpoint,
    pin,
    scan,
    unpin,
)
from milepost.stores import Entry, LocalStore, MemoryStore
from milepost.tensors.pack import pack_item
from milepost.testing import FaultStore
from milepost.writer import RunWriter

PATIENCE_S = 30.0


def new_writer(store, *keep, **options) -> RunWriter:
    writer = RunWriter(store, WriterOptions(keep=keep, **options))
    writer.open(lambda _: None, check=lambda _: None)
    return writer


def save(writer: RunWriter, name: str, *, number: int = 1, loss: float = 0.5) -> str:
    request = SaveRequest(
        name=name, reason="manual", time={"batch": number}, metrics={"loss": loss}
    )
    pending = writer.save([pack_item("state", {"number": 7})], request)
    return pending.wait(PATIENCE_S).name


def calls_of_saves(store: FaultStore, writer: RunWriter, folder: str = "") -> list[Counter[str]]:
    """Save 24 checkpoints; return how often each operation was asked for, save by save."""
    counts = []
    for number in range(1, 25):
        store.operations.clear()
        save(writer, f"{folder}ba{number:02}", number=number)
        counts.append(Counter(operation.split()[0] for operation in store.operations))
    writer.close()
    return counts


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
@pytest.mark.parametrize(
    "keep", [(), (KeepAll(),), (KeepEvery("1ba"),), (KeepLast(20),), (KeepBest(20, "loss"),)]
)
def test_the_calls_of_a_save_do_not_grow_with_the_run(keep, save_format):
    """Or a run that keeps everything would get slower until saving is all that it does."""
    store = FaultStore(MemoryStore())
    counts = calls_of_saves(store, new_writer(store, *keep, save_format=save_format))
    assert counts[1:20] == [counts[1]] * 19
    assert counts[21:] == [counts[21]] * 3  # some delete one each time by now


def test_a_save_that_deletes_looks_at_the_run_once():
    """For the decision; what may have changed since is asked of the store for each victim."""
    store = FaultStore(MemoryStore())
    writer = new_writer(store, KeepLast(1))
    for name in ("ba1", "ba2"):
        store.operations.clear()
        save(writer, name)
    writer.close()
    assert "rename ba1/manifest.json ba1/deleted.json" in store.operations
    assert store.operations.count("list ") == 1


def test_a_save_on_disk_reads_no_more_in_a_long_run(tmp_path):
    """The folders of the others are looked at, twice each, and nothing in them is opened."""
    store = FaultStore(LocalStore(tmp_path / "run"))
    counts = calls_of_saves(store, new_writer(store, KeepEvery("1ba")))
    heads = [count.pop("head") for count in counts[1:]]
    assert [late - early for early, late in pairwise(heads)] == [2] * 22
    assert counts[1:] == [counts[1]] * 23


@pytest.mark.parametrize("keep", [(), (KeepAll(),)])
def test_a_save_that_can_give_up_nothing_does_not_look_at_the_run(tmp_path, keep):
    """What nobody asks for costs nothing, on any store."""
    for place in (MemoryStore(), LocalStore(tmp_path / "run")):
        store = FaultStore(place)
        counts = calls_of_saves(store, new_writer(store, *keep))
        assert counts[1:] == [counts[1]] * 23
        assert counts[1]["folders"] == 0
        assert "list " not in store.operations


def test_diagnostic_checkpoints_cost_no_more_in_a_long_run():
    """A crash loop saves one each time."""
    store = FaultStore(MemoryStore())
    writer = new_writer(store, KeepEvery("1ba"))
    for number in range(1, 6):
        save(writer, f"ba{number}", number=number)
    counts = calls_of_saves(store, writer, "nan/")
    assert counts[4:] == [counts[4]] * 20
    names = [found.name for found in scan(store).found]
    assert names[5:] == ["nan/ba22", "nan/ba23", "nan/ba24"]


class Blind:
    """Shows the same size and time for every commit."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.url, self.traits = store.url, store.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, folder: str = "") -> Iterator[Entry]:
        return map(self._blur, self._store.list(folder))

    def head(self, key: str) -> Entry:
        return self._blur(self._store.head(key))

    def _blur(self, entry: Entry) -> Entry:
        return Entry(entry.key, 1, 1.0) if entry.key.endswith("/manifest.json") else entry


def test_a_name_that_is_used_again_is_judged_by_what_is_there_now():
    """Even where nothing that the store shows tells the new commit from the one before."""
    store = MemoryStore()
    writer = new_writer(Blind(store), KeepBest(2, "loss"))
    save(writer, "other", loss=0.3)
    save(writer, "again", loss=0.1)
    delete_checkpoint(store, "again")
    assert save(writer, "again", loss=0.9) == "again"
    save(writer, "newest", loss=0.8)
    assert [found.name for found in scan(store).lineage()] == ["other", "newest"]
    writer.close()


def test_what_is_pinned_after_the_look_is_spared():
    """A session looks at the run once for the decision and the deletion; pins are asked for."""
    below, pinned = MemoryStore(), []

    def pin_late(_number: int, operation: str) -> None:
        is_there = any(entry.key == "ba2/manifest.json" for entry in below.list())
        if operation == "list " and is_there and not pinned:
            pinned.append(operation)
            pin(below, "ba1")

    writer = new_writer(FaultStore(below, before=pin_late), KeepLast(1))
    for name in ("ba1", "ba2"):
        save(writer, name)
    assert pinned
    assert [found.name for found in scan(below).lineage()] == ["ba1", "ba2"]
    unpin(below, "ba1")
    save(writer, "ba3")
    assert [found.name for found in scan(below).lineage()] == ["ba3"]
    writer.close()


def test_what_a_session_goes_on_from_is_chosen_by_commits_read_after_it_began():
    """What the process read before may have been replaced by the session in between."""
    store = FaultStore(MemoryStore())
    writer = new_writer(store, KeepLast(9))
    for name in ("ba1", "ba2", "ba3"):
        save(writer, name)
    writer.close()
    store.operations.clear()
    writer.open(lambda _: None, check=lambda _: None)
    begun = store.operations.index("put_new sessions/00000002.json")
    chosen = store.operations.index("put_new sessions/00000002.from.json")
    read = store.operations[begun:chosen]
    assert {f"get {name}/manifest.json" for name in ("ba1", "ba2", "ba3")} <= set(read)
    writer.close()


def test_a_metric_that_no_checkpoint_has_is_told_of_once(caplog):
    """KeepBest keeps everything then, which shows only when the disk is full."""
    store = MemoryStore()
    writer = new_writer(store, KeepLast(2), KeepBest(1, "los"))
    for number in range(1, 8):
        save(writer, f"ba{number}", number=number)
        said = [one for one in caplog.messages if "'los'" in one]
        assert len(said) == (number >= 5)
    writer.close()
    assert "Was 'loss' meant?" in said[0]
    assert len(scan(store).lineage()) == 7


def test_nothing_is_said_of_a_metric_that_some_checkpoint_has(caplog):
    """Checkpoints between two evaluations have none."""
    writer = new_writer(MemoryStore(), KeepBest(4, "loss"))
    for number in range(1, 8):
        save(writer, f"ba{number}", number=number)
    writer.close()
    assert not [one for one in caplog.messages if "KeepBest" in one]
