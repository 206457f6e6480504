"""What ``doctor`` finds out about an object store, and what it leaves there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milepost.cli.store_probes import probe_store
from milepost.errors import AccessError, StorageError
from milepost.stores import MemoryStore


class Odd:
    """A place that refuses or gets wrong some of what it is asked for."""

    def __init__(self, **changed):
        self.below = MemoryStore("odd")
        self.url, self.traits = self.below.url, self.below.traits
        self.changed = changed

    def __getattr__(self, name):
        return self.changed.get(name) or getattr(self.below, name)


def refuse(*_arguments, **_options):
    raise AccessError("The place refuses this.")


def looked(store) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.hint) for check in probe_store(store)}


def test_a_place_in_order_passes_and_is_left_as_it_was():
    """Every probe has an answer, and nothing is left."""
    store = MemoryStore("fine")
    store.put("mine", b"x")
    found = looked(store)
    assert {status for status, _ in found.values()} == {"ok"}
    assert {
        *("list", "writable", "read", "replace", "list after write", "delete", "upload"),
        *("exclusive create", "ranged read", "copy", "latency", "clock"),
    } == set(found)
    assert [entry.key for entry in store.list()] == ["mine"]


def test_a_right_that_is_refused_says_what_will_fail():
    """And the others are tried all the same."""
    for operation, check, word in (
        ("list", "list", "no resume"),
        ("get", "read", "resumed"),
        ("link", "copy", "sync"),
        ("create_writer", "upload", "8 MiB"),
        ("put_new", "exclusive create", "begun"),
    ):
        found = looked(Odd(**{operation: refuse}))
        assert found[check][0] == "fail"
        assert word in found[check][1]
        assert found["clock"][0] == "ok"


def test_a_place_that_keeps_everything_is_told_of_and_what_is_left():
    """Without the right to delete, prune fails."""
    store = Odd(delete=refuse)
    found = looked(store)
    assert found["delete"][0] == "fail"
    assert "prune" in found["delete"][1]
    assert found["tidied up"][0] == "warn"


def test_where_nothing_can_be_written_nothing_else_is_tried():
    """The one finding says it all."""
    found = looked(Odd(put=refuse))
    assert found["writable"][0] == "fail"
    assert set(found) == {"list", "writable"}


def test_a_place_that_creates_twice_is_for_one_writer():
    """Nothing refuses the second commit."""
    store = Odd()
    store.changed["put_new"] = store.below.put
    assert found_of(store, "exclusive create") == ("warn", "Single writer only")
    # One that looks before it creates, because the service does not refuse.
    looking = Odd()
    looking.traits = replace(looking.traits, exclusive_create=False)
    assert found_of(looking, "exclusive create") == ("warn", "Single writer only")


def found_of(store, name):
    status, hint = looked(store)[name]
    return status, hint.partition(":")[0]


def test_a_list_that_lags_and_bytes_that_differ_are_found():
    """A resume would go on from an older checkpoint, or from other weights."""
    lagging = Odd(list=lambda folder="": iter(()))
    assert looked(lagging)["list after write"][0] == "fail"
    wrong = Odd(get=lambda key, max_bytes=0: b"wrong")
    found = looked(wrong)
    assert found["read"][0] == "fail"
    assert found["replace"][0] == "warn"


def test_what_was_written_is_removed_when_the_look_is_cut_off():
    """Ctrl-C in the middle."""
    store = MemoryStore("cut")
    look = probe_store(store)
    while next(look).name != "upload":
        pass
    assert list(store.list())
    look.close()
    assert not list(store.list())

    def interrupt(*_arguments):
        raise KeyboardInterrupt

    odd = Odd(create_writer=interrupt)
    with pytest.raises(KeyboardInterrupt):
        looked(odd)
    assert not list(odd.below.list())


def test_an_upload_that_fails_is_one_finding():
    """The rest is tried all the same."""

    def fail(*_arguments):
        raise StorageError("The line is down.")

    found = looked(Odd(create_writer=fail))
    assert found["upload"][0] == "fail"
    assert found["latency"][0] == "ok"
