"""What failed attempts have left, removed between saves."""

from __future__ import annotations

from milepost.errors import StorageError
from milepost.runs import claim
from milepost.runs.leftovers import Leftovers
from milepost.stores import MemoryStore
from milepost.testing import FaultStore


def test_a_store_that_falters_holds_a_save_up_once(store: MemoryStore, begin) -> None:
    """Each request may be tried for minutes; all of them would be the time of a save that is done.

    The next save begins with what was not tried, so that one folder that cannot be removed does not
    keep the others.
    """
    session = begin(store)
    away, is_away = [], True

    def fail(number: int, operation: str) -> None:
        del number
        if is_away or (away[1:] and "bad" in operation):
            away.append(operation)
            raise StorageError("away", operation=operation, path="x")

    faulty = FaultStore(store, before=fail)
    leftovers = Leftovers(faulty)
    for number, folder in enumerate(("bad", "a", "b"), 1):
        held = claim(store, session, folder, number)
        store.put_new(f"{folder}/part", b"1")
        leftovers.give_up(held, StorageError("first"))
    assert len(away) == 3
    leftovers.remove()
    assert len(away) == 4
    is_away = False
    leftovers.remove()
    assert [name for name in ("bad", "a", "b") if name in store.folders()] == ["bad"]
    assert len(away) == 5


def test_an_erasure_ends_with_the_first_answer_that_does_not_come(
    store: MemoryStore, begin
) -> None:
    """A folder may hold hundreds of parts, each with its own tries."""
    held = claim(store, begin(store), "ep1", 1)
    for number in range(5):
        store.put_new(f"ep1/part-{number}", b"1")
    asked = []

    def fail(number: int, operation: str) -> None:
        del number
        if operation.startswith("delete ep1/part"):
            asked.append(operation)
            raise StorageError("away", operation="delete", path="x")

    Leftovers(FaultStore(store, before=fail)).give_up(held, StorageError("first"))
    assert len(asked) == 1
