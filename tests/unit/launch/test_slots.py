"""How many workers there is room for."""

from __future__ import annotations

import pytest

from milepost.errors import MissingError, UsageError
from milepost.launch.machine import LocalEngine
from milepost.launch.slots import num_processors, slots_of


def test_a_number_or_a_file_that_holds_one_says_it(tmp_path):
    """The file is read each time."""
    file = tmp_path / "slots"
    assert slots_of("") is None
    assert slots_of("3") == 3
    for number in (4, 2, 0):
        file.write_text(f"{number}\n")
        assert slots_of(str(file)) == number


def test_what_says_nothing_is_refused_in_words(tmp_path):
    """A typing error must not start a training on all the machine has."""
    with pytest.raises(MissingError):
        slots_of(str(tmp_path / "nothing"))
    (tmp_path / "slots").write_text("many")
    with pytest.raises(UsageError, match="holds no number of workers: 'many'"):
        slots_of(str(tmp_path / "slots"))


def test_slots_are_the_limit_and_processors_where_nobody_says(monkeypatch):
    """A fixed number is what was asked for, on however small a machine."""
    monkeypatch.delenv("MILEPOST_SLOTS", raising=False)
    count = num_processors()
    assert LocalEngine().reserve(count + 3, count + 3) == count + 3
    assert LocalEngine().reserve(1, count + 3) == count
    assert LocalEngine(is_told=True).reserve(1, count + 3) == count + 3
    monkeypatch.setenv("MILEPOST_SLOTS", "1")
    assert LocalEngine().reserve(2, 4) == 1
    assert LocalEngine(is_told=True).reserve(1, 4) == 1
