"""Progress: a bar on a terminal, a line now and then elsewhere, nothing when off."""

from __future__ import annotations

import io

import pytest

from milepost import display
from milepost.display import loading_bar, training_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    """With the position and the text."""
    out = Terminal()
    with training_bar(total=10, stream=out) as bar:
        bar.update(10, text="epoch 1")
    assert "10/10" in out.getvalue()
    assert "epoch 1" in out.getvalue()


def test_nothing_is_shown_when_off() -> None:
    """Other ranks, or the user's wish."""
    out = Terminal()
    with loading_bar("x", total_bytes=5, is_shown=False, stream=out) as bar:
        bar.update(5)
    assert out.getvalue() == ""


def test_a_file_gets_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log must not be filled with thousands of positions."""
    now_s = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now_s[0])
    out = io.StringIO()
    with training_bar(total=100, stream=out) as bar:
        for number in range(100):
            now_s[0] += 1.0
            bar.update(number + 1, text="epoch 0")
    assert out.getvalue().splitlines() == [
        "training: 30 of 100 epoch 0",
        "training: 60 of 100 epoch 0",
        "training: 90 of 100 epoch 0",
    ]
