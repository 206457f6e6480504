"""Any sequence of calls to a store means what it means to a dictionary."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from milepost.errors import ExistsError, MissingError
from milepost.stores import LocalStore, MemoryStore, PrefixStore
from milepost.testing import read_key, write_key

# No key is the folder of another: that is the one thing which files cannot be.
KEYS = st.sampled_from(["a", "b.txt", "ep1/x", "ep1/y/z", "ep1-best/x", "ep10/x", "ep2/y"])
DATA = st.binary(max_size=40) | st.just(b"z" * 5_000)


class StoreMachine(RuleBasedStateMachine):
    """The dictionary is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make_store()
        self.expected: dict[str, bytes] = {}

    def make_store(self):
        raise NotImplementedError

    def both(self, call, change, *errors) -> None:
        """Make a call that must fail exactly when the oracle says so."""
        for kind, must_fail in errors:
            if must_fail:
                with pytest.raises(kind):
                    call()
                return
        call()
        change()

    @rule(key=KEYS, data=DATA)
    def put_new(self, key, data):
        there = key in self.expected
        self.both(
            lambda: self.store.put_new(key, data),
            lambda: self.expected.update({key: data}),
            (ExistsError, there),
        )

    @rule(key=KEYS, data=DATA)
    def put(self, key, data):
        self.store.put(key, data)
        self.expected[key] = data

    @rule(key=KEYS, data=DATA)
    def write(self, key, data):
        self.both(
            lambda: write_key(self.store, key, data),
            lambda: self.expected.update({key: data}),
            (ExistsError, key in self.expected),
        )

    @rule(key=KEYS)
    def abort(self, key):
        if key not in self.expected:
            self.store.create_writer(key, 10).abort()

    @rule(key=KEYS)
    def delete(self, key):
        self.store.delete(key)
        self.expected.pop(key, None)

    @rule(key=KEYS, new_key=KEYS)
    def rename(self, key, new_key):
        if key != new_key:
            self.both(
                lambda: self.store.rename(key, new_key),
                lambda: self.expected.update({new_key: self.expected.pop(key)}),
                (MissingError, key not in self.expected),
                (ExistsError, new_key in self.expected),
            )

    @rule(key=KEYS, new_key=KEYS)
    def link(self, key, new_key):
        if key != new_key:
            self.both(
                lambda: self.store.link(key, new_key),
                lambda: self.expected.update({new_key: self.expected[key]}),
                (MissingError, key not in self.expected),
                (ExistsError, new_key in self.expected),
            )

    @rule(key=KEYS)
    def read(self, key):
        self.both(
            lambda: read_key(self.store, key),
            lambda: None,
            (MissingError, key not in self.expected),
        )

    @rule(folder=st.sampled_from(["ep1", "ep1/y", "ep", "ep10", "none"]))
    def list_folder(self, folder):
        inside = sorted(key for key in self.expected if key.startswith(folder + "/"))
        assert [entry.key for entry in self.store.list(folder)] == inside

    @invariant()
    def same(self):
        listed = list(self.store.list())
        assert [entry.key for entry in listed] == sorted(self.expected)
        for entry in listed:
            assert self.store.get(entry.key) == self.expected[entry.key]
            assert entry.size_bytes == len(self.expected[entry.key])
            assert self.store.head(entry.key) == entry
        folders = {key.partition("/")[0] for key in self.expected if "/" in key}
        assert self.store.folders() == sorted(folders)


class LocalMachine(StoreMachine):
    def make_store(self):
        self.folder = tempfile.mkdtemp()
        return LocalStore(self.folder)

    def teardown(self):
        shutil.rmtree(self.folder)


class MemoryMachine(StoreMachine):
    def make_store(self):
        return MemoryStore()


class PrefixMachine(StoreMachine):
    def make_store(self):
        below = MemoryStore()
        below.put("elsewhere/a", b"1")
        return PrefixStore(below, "some/where")


TestLocal = LocalMachine.TestCase
TestMemory = MemoryMachine.TestCase
TestPrefix = PrefixMachine.TestCase
TestLocal.settings = TestMemory.settings = TestPrefix.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
