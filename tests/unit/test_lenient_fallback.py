"""A lenient resume passes over a damaged checkpoint, and nothing of that one is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import milepost as mp
from milepost import opening
from milepost.errors import MismatchError
from milepost.runs.verify import Level

WIDTH = 2300  # 21 MB: three blocks


def parts(*names: str) -> dict[str, Any]:
    """New models of a few blocks, all zeros."""
    made = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names}
    for model in made.values():
        nn.init.zeros_(model.weight)
    return made


def save(place: Any, name: str, value: float, *names: str) -> None:
    made = parts(*names)
    with mp.Checkpointer(place, strict=False, handle_signals=False, **made) as run:
        for model in made.values():
            nn.init.constant_(model.weight, value)
        run.save(name, wait=True)


def damage(path: Any) -> None:
    """Alter a byte in the last block, and leave it in the page cache."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(bytes(data))
    path.read_bytes()


@pytest.fixture
def levels(monkeypatch) -> list[Level]:
    """How closely a resume looks at checkpoints."""
    looked: list[Level] = []
    newest_good = opening.newest_good

    def look(store: Any, view: Any, *, level: Level = Level.QUICK) -> Any:
        looked.append(level)
        return newest_good(store, view, level=level)

    monkeypatch.setattr(opening, "newest_good", look)
    return looked


def test_nothing_of_a_damaged_checkpoint_stays_where_the_older_one_has_nothing(tmp_path, levels):
    """An average that was added since would be a mixture of what was, what is, and garbage."""
    save(tmp_path, "one", 1.0, "model")
    save(tmp_path, "two", 2.0, "model", "ema")
    damage(tmp_path / "two" / "ema.safetensors")
    made = parts("model", "ema")
    with mp.Checkpointer(tmp_path, strict=False, handle_signals=False, **made) as run:
        assert run.resumed_from == "one"
        assert "two: " in run.load_report.summary()
    assert bool((made["model"].weight == 1).all())
    assert bool((made["ema"].weight == 0).all())
    assert Level.FULL in levels


def test_what_the_older_one_overwrites_anyway_is_read_once(tmp_path, levels):
    """Also a lenient resume, as long as the state is the same from one to the other."""
    save(tmp_path, "one", 1.0, "model")
    save(tmp_path, "two", 2.0, "model")
    damage(tmp_path / "two" / "model.safetensors")
    del levels[:]
    made = parts("model", "ema")  # which neither of them has
    with mp.Checkpointer(tmp_path, strict=False, handle_signals=False, **made) as run:
        assert run.resumed_from == "one"
    assert bool((made["model"].weight == 1).all())
    assert bool((made["ema"].weight == 0).all())
    assert set(levels) == {Level.QUICK}


def test_damage_that_comes_after_the_look_does_not_pass_in_silence(tmp_path, monkeypatch):
    """What is left of it is named, and nothing begins."""
    save(tmp_path, "one", 1.0, "model")
    save(tmp_path, "two", 2.0, "model", "ema")
    newest_good = opening.newest_good

    def look(store: Any, view: Any, *, level: Level = Level.QUICK) -> Any:
        found = newest_good(store, view, level=level)
        if level is Level.FULL:
            damage(tmp_path / "two" / "ema.safetensors")
        return found

    monkeypatch.setattr(opening, "newest_good", look)
    run = mp.Checkpointer(
        tmp_path, strict=False, handle_signals=False, **parts("model", "ema", "more")
    )
    with pytest.raises(MismatchError, match="two turned out damaged") as caught:
        run.open()
    assert caught.value.facts["names"] == ["ema"]
