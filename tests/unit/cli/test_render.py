"""How values look."""

from __future__ import annotations

import pytest

from milepost.cli import render


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (200 * 1024, "200 KiB"),
        (1000 * 1024, "1.0 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5000 * 1024**4, "5000 TiB"),
    ],
)
def test_sizes_use_binary_units(num_bytes, text):
    """KiB is 1024, as the tools beside this one count it."""
    assert render.size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (0, "now"),
        (5, "5 s ago"),
        (119, "1 min ago"),
        (7200, "2 h ago"),
        (200_000, "2 d ago"),
        (-5, "now"),
        (-3600, "in the future"),
    ],
)
def test_ages_are_told_in_their_largest_unit(age_s, text):
    """A clock that is off is told instead of a negative age."""
    assert render.age_text(1_000_000 - age_s, now_s=1_000_000) == text


def test_plain_tables_align_and_drop_empty_columns(capsys):
    """Numbers end, and words begin, at one place; nothing is cut short."""
    columns = [render.Column("name"), render.Column("none"), render.Column("n", is_number=True)]
    render.print_table(columns, [["a", "", "1"], ["long" * 40, "", "100"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "n"]
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("long" * 40)


def test_terminal_tables_show_square_brackets(capsys, monkeypatch):
    """Names of tensors are data and never markup."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    render.print_table([render.Column("name")], [["f1 [bold]macro[/bold]"]])
    assert "f1 [bold]macro[/bold]" in capsys.readouterr().out


def test_cells_are_broken_where_words_end():
    """Half a name, or ``float3`` and ``2``, cannot be read; what is whole stays so."""
    columns = [
        render.Column("tensor"),
        render.Column("before", is_whole=True),
        render.Column("bytes", is_number=True),
    ]
    row = ["optimizers/AdamW/state/0.weight/exp_avg_sq", "float32 [64, 64]", "16.0 KiB"]
    assert render.fitted([row], columns, 80) == [row]
    ((name, *others),) = render.fitted([row], columns, 60)
    assert name.split("\n") == ["optimizers/AdamW/state/0.weight/", "exp_avg_sq"]
    assert others == row[1:]
    assert max(map(len, name.split("\n"))) + sum(map(len, others)) + 4 <= 60
    # What cannot be made to fit is left alone.
    assert render.fitted([row], columns[1:2] * 3, 10) == [row]
    # A word that is longer than all there is room for is broken, and not lost.
    ((name, *_),) = render.fitted([["x" * 90, *row[1:]]], columns, 60)
    assert name.replace("\n", "") == "x" * 90


def test_a_metric_is_shown_once():
    """An evaluator's metric has a short name beside the long one while it is the only one."""
    same = {"Accuracy": 0.9359, "loss": 0.5, "test/Accuracy": 0.9359}
    assert render.metrics_text(same) == "Accuracy=0.9359 loss=0.5"
    other = {"Accuracy": 0.5, "test/Accuracy": 0.9359}
    assert render.metrics_text(other) == "Accuracy=0.5 test/Accuracy=0.9359"
