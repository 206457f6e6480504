"""Whether to compress, where that is left to be found out."""

from __future__ import annotations

import logging
import time

import pytest
import torch

import milepost as mp
from milepost.engine import choosing
from milepost.engine.choosing import Choice, Trial
from milepost.frames import codec
from milepost.runs import scan
from milepost.stores.blocks import LocalWriter
from milepost.stores.local import LocalStore

GB = 10**9


class Place:
    """Saves to a place of a known speed, with a codec of known speeds."""

    def __init__(self, *, zstd=(0.5, 0.84), lz4=(1.5, 0.88)):
        self.choice = Choice("auto", num_threads=2)
        self.choice._num_threads = 2
        self.trials = {"zstd": Trial(zstd[0] * GB, zstd[1]), "lz4": Trial(lz4[0] * GB, lz4[1])}
        self.num_trials = 0
        self.choice._try = self.give_trials

    def give_trials(self, block, item_bytes):
        self.num_trials += 1
        return self.trials

    def save(self, rate_gb, *, slower=1.0):
        """Save 1 GB; return what it was compressed with."""
        method = self.choice.method(lambda: (memoryview(b"x"), 1))
        if method is None:
            self.note(1.0, 1 / rate_gb, None)
            return None
        trial = self.trials[method]
        put_s = trial.ratio / rate_gb
        write_s = max(put_s, GB / trial.bytes_s / 2) * slower
        self.note(trial.ratio, write_s, put_s)
        return method

    def note(self, stored_gb, write_s, put_s):
        self.choice.note(
            plain_bytes=GB, stored_bytes=int(stored_gb * GB), write_s=write_s, put_s=put_s
        )


@pytest.mark.parametrize(
    ("rate_gb", "method"),
    [(0.05, "zstd"), (0.5, "zstd"), (1.2, "lz4"), (2.4, "lz4"), (3.0, None), (20.0, None)],
)
def test_it_follows_from_the_speed_of_the_place(rate_gb, method):
    """On a fast disk compression makes saves longer, on a slow one shorter."""
    place = Place()
    assert [place.save(rate_gb) for _ in range(5)] == [None, None, method, method, method]
    assert place.num_trials == (rate_gb < 6)
    assert ("compressed with" in place.choice.why) == (method is not None)


def test_one_slow_save_does_not_begin_it():
    """Somebody else was at the disk; the next save would only take longer."""
    place = Place()
    rates = [0.1, 4.0, 4.0, 0.1, 4.0, 0.1, 0.1]
    assert [place.save(rate) for rate in rates] == [None] * 7


def test_it_does_not_waver():
    """A place about as fast as the codec is not worth a change at every save."""
    place = Place(zstd=(0.5, 0.95), lz4=(0.5, 0.95))
    assert [place.save(rate) for rate in (0.96, 0.94, 0.9, 0.95, 0.9)] == [None] * 5
    place = Place()
    place.save(1.0)
    place.save(1.0)
    assert {place.save(rate) for rate in (1.0, 1.05, 0.95, 1.1, 0.9, 1.0)} == {"lz4"}


def test_it_ends_when_the_place_becomes_fast():
    """A network that was busy at the start must not cost saves for the rest of the run."""
    place = Place()
    assert [place.save(0.2) for _ in range(3)] == [None, None, "zstd"]
    assert place.save(9.0) == "zstd"
    assert [place.save(9.0) for _ in range(2)] == [None, None]


def test_a_promise_that_is_not_kept_is_the_end_of_it():
    """Training takes the processor that the trial had for itself."""
    place = Place()
    assert [place.save(1.0) for _ in range(3)] == [None, None, "lz4"]
    assert [place.save(1.0, slower=2.0) for _ in range(2)] == ["lz4", "lz4"]
    assert [place.save(1.0) for _ in range(20)] == [None] * 20
    assert place.save(1.0) == "lz4"


def test_small_saves_say_nothing():
    """They take as long as it takes to open files, whatever is in them."""
    choice = Choice("auto", num_threads=2)
    for _ in range(9):
        assert choice.method(lambda: pytest.fail("a trial")) is None
        choice.note(plain_bytes=10**6, stored_bytes=10**6, write_s=1.0, put_s=None)


def test_without_the_library_it_is_off_and_says_so_once(monkeypatch, caplog):
    """A run must not fail for want of what it would perhaps have used."""
    monkeypatch.setattr(choosing, "has_codec", lambda: False)
    with caplog.at_level(logging.INFO, "milepost"):
        choice = Choice("auto", num_threads=2)
        for _ in range(9):
            assert choice.method(lambda: pytest.fail("a trial")) is None
            choice.note(plain_bytes=GB, stored_bytes=GB, write_s=9.0, put_s=None)
    assert caplog.text.count("not installed") == 1


@pytest.mark.parametrize(
    "error",
    [OSError("libblosc2.so.7: cannot open"), ImportError("no symbol"), ValueError("size changed")],
    ids=repr,
)
def test_with_a_library_that_does_not_load_it_is_off_and_says_so_once(monkeypatch, caplog, error):
    """It is found out at the third save, which must not fail for that, nor those after it."""

    def fail():
        raise error

    monkeypatch.setattr(codec, "_library", fail)
    choice = Choice("auto", num_threads=2)
    for _ in range(9):
        assert choice.method(lambda: (memoryview(bytes(100_000)), 4)) is None
        choice.note(plain_bytes=GB, stored_bytes=GB, write_s=9.0, put_s=None)
    assert caplog.text.count("does not load") == 1
    assert str(error) in choice.why


def test_saves_to_a_slow_place_become_compressed(tmp_path, monkeypatch):
    """Two plain saves tell how slow it is; the state comes back from all of them."""
    monkeypatch.setattr(choosing, "FEWEST_BYTES", 1_000_000)
    write_at = LocalWriter.write_at

    def slowly(self, offset, data):
        time.sleep(len(data) / 40e6)
        write_at(self, offset, data)

    model = torch.nn.Linear(1_000, 3_000)
    with mp.Checkpointer(tmp_path / "slow", save_compression="auto", model=model) as run:
        monkeypatch.setattr(LocalWriter, "write_at", slowly)
        for name in "abcd":
            with torch.no_grad():
                model.weight.add_(1)
            run.save(name, wait=True)
    manifests = [found.manifest for found in scan(LocalStore(tmp_path / "slow")).lineage()]
    manifests.sort(key=lambda one: one.name)
    assert [one.is_compressed for one in manifests] == [False, False, True, True]
    assert "compressed with" in manifests[2].stats["compression"]
    other = torch.nn.Linear(1_000, 3_000)
    mp.open_run(tmp_path / "slow").get("d").load_weights(other)
    assert torch.equal(other.weight, model.weight)


def test_nothing_is_loaded_before_it_is_needed(tmp_path, monkeypatch):
    """To load the library takes half a second of a processor that trains."""
    monkeypatch.setattr(codec, "_library", lambda: pytest.fail("loaded"))
    with mp.Checkpointer(tmp_path, save_compression="auto", model=torch.nn.Linear(9, 9)) as run:
        for name in "abc":
            run.save(name, wait=True)
