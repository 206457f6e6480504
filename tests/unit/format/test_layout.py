"""Names and keys inside a run."""

from __future__ import annotations

import pytest

from milepost.errors import FormatError, UsageError
from milepost.format import layout

RESERVED = ["run.json", "sessions", "pins", "latest", "events", "validations", "nan", "failed"]


@pytest.mark.parametrize(
    "name", ["ep1", "ba500", "_", "a.b", "epoch=3", "x@y,z~1", "A-b", "9", "e" * 128]
)
def test_plain_name_is_taken_as_it_is(name):
    """The folder on the disk carries the name that was chosen."""
    assert layout.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "C:", "a b", "a\n", "a\0", "\u00fc",
        "e" * 129, None, 3, b"ep1", *RESERVED,
    ],
)  # fmt: skip
def test_name_that_some_place_refuses_is_refused(name):
    """At the start, not at the first save hours later."""
    with pytest.raises(UsageError):
        layout.check_name(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ep1", "ep1"),
        ("3-val/loss=0.250", "3-val_loss=0.250"),
        ("acc:top 1", "acc_top_1"),
        ("lr=1e-07", "lr=1e-07"),
        ("../x", "_.._x"),
        ("-x", "_-x"),
        (".x", "_.x"),
        ("", "_"),
        ("latest", "_latest"),
        ("\u00fc", "_"),
        ("a\0b\nc", "a_b_c"),
    ],
)
def test_metric_in_a_name_stays_one_folder(text, name):
    """A slash in a metric's name must not make a subfolder, nor a colon fail the first save."""
    assert layout.safe_name(text) == name
    assert layout.check_name(name) == name


def test_long_names_are_cut_and_stay_distinct():
    """Most file systems allow 255 bytes; two runs of 300 characters must not share a folder."""
    first, second = layout.safe_name("r" * 299 + "a"), layout.safe_name("r" * 299 + "b")
    assert first != second
    assert first[:119] == second[:119] == "r" * 119
    assert layout.check_name(first) == first
    assert len(first) == 128
    assert layout.safe_name("r" * 128) == "r" * 128


def test_name_from_undecodable_bytes_is_made_safe():
    """File names of other programs reach us with lone surrogates."""
    name = layout.safe_name("\udcff" * 200)
    assert layout.check_name(name) == name


@pytest.mark.parametrize(
    ("name", "session", "attempt", "folder"),
    [
        ("ep3", 2, 0, "ep3-s2"),
        ("ep3", 2, 7, "ep3-s2a7"),
        ("e" * 128, 2, 7, "e" * 123 + "-s2a7"),
    ],
)
def test_taken_name_gets_a_folder_of_its_own(name, session, attempt, folder):
    """Later sessions never write into an earlier one's folder."""
    assert layout.folder_name(name, session, attempt) == folder
    assert layout.check_name(folder) == folder


@pytest.mark.parametrize(
    "key", ["a", "model.safetensors", "a/b/c.json", ".milepost/run.json", "..a", "a..", "..."]
)
def test_plain_key_is_taken_as_it_is(key):
    """Dots are only special when they stand alone."""
    assert layout.check_key(key, where="r") == key


@pytest.mark.parametrize(
    "key",
    [
        "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "./a", ".", "a//b", "a/", "C:/x",
        "c:x", "a\\b", "\\\\host\\x", "a\0b", "a\nb", "a b", "~root\n", "\u2025/a",
        "a" * 1025, None, 1, True, ["a"], b"a",
    ],
)  # fmt: skip
def test_key_that_leads_out_of_its_folder_is_refused(key):
    """Keys come from strangers' manifests and are joined to a folder."""
    with pytest.raises(FormatError):
        layout.check_key(key, where="r")


def test_session_keys_sort_by_number_and_read_back():
    """Listings are in the order of the keys; the newest session stands last."""
    assert layout.session_key(1) == "sessions/00000001.json"
    assert layout.from_key(12) == "sessions/00000012.from.json"
    for number in (1, 99_999_999, 123_456_789):
        assert layout.session_number(layout.session_key(number)) == number
        assert layout.session_number(layout.from_key(number)) is None


@pytest.mark.parametrize(
    "key",
    [
        "sessions/1.json",
        "sessions/x.json",
        "sessions/00000001.json.tmp",
        "",
        "00000001",
        "\u0661" * 8 + ".json",
    ],
)
def test_foreign_file_is_no_session(key):
    """A temporary or stray file must not count as the newest session."""
    assert layout.session_number(key) is None


def test_part_and_pin_have_fixed_names():
    """Other tools open these by name."""
    assert layout.part_file("model") == "model.safetensors"
    assert layout.part_file("model", variant="frozen") == "model-frozen.safetensors"
    assert layout.part_file("model", rank=3) == "model-r00003.safetensors"
    frozen = layout.part_file("model", variant="frozen", rank=3)
    assert frozen == "model-frozen-r00003.safetensors"
    assert layout.pin_key("ep3") == "pins/ep3.json"
