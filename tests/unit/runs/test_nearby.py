"""Runs below a place that is none."""

from __future__ import annotations

import pytest

from milepost import errors, runs
from milepost.checkpoint import open_checkpoint, open_run
from milepost.runs.nearby import missing_run, runs_below
from milepost.stores.local import LocalStore
from milepost.stores.memory import MemoryStore
from milepost.stores.prefix import PrefixStore


class CountingStore(MemoryStore):
    """Counts the requests of a look."""

    num_requests = 0

    def folders(self, folder=""):
        self.num_requests += 1
        return super().folders(folder)

    def head(self, key):
        self.num_requests += 1
        return super().head(key)


def begin(store, folder):
    below = PrefixStore(store, folder)
    runs.open_session(below, runs.ensure_run(below))


def test_runs_are_found_a_few_levels_down():
    """Also those with records in a hidden folder; none inside of another, none of other tools."""
    store = MemoryStore()
    for folder in ("a/rank_0/checkpoints", "b", "b/inner", "c/.milepost"):
        begin(store, folder)
    store.put("d/sessions/notes.txt", b"of somebody else")
    store.put("e/run.json", b"{}")
    assert runs_below(store) == ["b", "c", "a/rank_0/checkpoints"]


def test_a_look_into_a_large_bucket_is_short():
    """It is only for a hint: thousands of folders must not be a thousand requests."""
    store = CountingStore()
    for number in range(300):
        store.put(f"data-{number:03}/x/y/z/part", b"1")
    assert runs_below(store) == []
    assert store.num_requests <= 1 + 4 * 8


def test_a_place_that_refuses_the_look_is_still_told_of():
    """What went wrong is that there is no run; that one may not look around must not replace it."""

    class Refusing(MemoryStore):
        def folders(self, folder=""):
            raise errors.AccessError("No.")

        def head(self, key):
            raise errors.AccessError("No.")

    error = missing_run(Refusing())
    assert error.facts["below"] == []
    assert "run.json" in error.hint


def test_a_run_and_a_checkpoint_say_what_is_below(tmp_path):
    """Both by the library: ``load_path_format="runs/digits"`` opens a checkpoint."""
    begin_at = tmp_path / "digits" / "rank_0" / "checkpoints"
    begin(LocalStore(tmp_path), "digits/rank_0/checkpoints")
    for opened in (open_run, open_checkpoint):
        with pytest.raises(errors.MissingError, match="There is a run below it") as caught:
            opened(tmp_path / "digits")
        assert caught.value.facts["below"] == ["rank_0/checkpoints"]
        assert str(begin_at) in caught.value.hint
