"""The safetensors header: ours is read by others, and others' cannot hurt us."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from milepost.errors import FormatError
from milepost.format import header

TENSORS = [
    ("w", "F64", (2, 3), 48),
    ("scale", "F32", (), 4),
    ("empty", "F32", (0, 7), 0),
    ("mask", "BOOL", (5,), 5),
]


def table(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(head: bytes, data_bytes: int) -> dict[str, header.StoredTensor]:
    return header.parse_header(head, size_bytes=8 + len(head) + data_bytes, where="part")


def test_layout_comes_back_from_its_own_bytes():
    """What is planned is what a reader finds."""
    head, entries = header.encode_header(TENSORS, metadata={"format": "pt"})
    size_bytes = len(head) + 57
    length = header.parse_header_length(head[:8], size_bytes=size_bytes, where="part")
    assert length == len(head) - 8
    parsed = header.parse_header(head[8:], size_bytes=size_bytes, where="part")
    assert list(parsed.values()) == entries
    assert [(e.key, e.dtype, e.shape, e.num_bytes) for e in entries] == TENSORS
    assert [e.start - len(head) for e in entries] == [0, 48, 52, 52]


def test_entries_stand_in_any_order_and_empty_ones_anywhere():
    """Other writers sort by name, and an empty tensor begins where another one does."""
    text = table(
        z=entry(offsets=[4, 8]),
        c=entry(offsets=[0, 4]),
        b=entry(shape=[0], offsets=[0, 0]),
        y=entry(shape=[0], offsets=[4, 4]),
        e=entry(shape=[0], offsets=[8, 8]),
    )
    found = parse(text, 8)
    starts = {key: one.start - 8 - len(text) for key, one in found.items()}
    assert starts == {"z": 4, "c": 0, "b": 0, "y": 4, "e": 8}


@pytest.mark.parametrize("num_tensors", [0, 1, 60, 61, 62, 500])
def test_data_starts_on_a_page(num_tensors):
    """Direct I/O and the mapping of a part both need it."""
    head, _ = header.encode_header((f"t{i}", "U8", (1,), 1) for i in range(num_tensors))
    assert len(head) % 4096 == 0
    assert len(head) - len(head.rstrip(b" ")) < 4096


def test_plain_safetensors_reads_our_part(tmp_path):
    """Weights must open without Milepost installed."""
    arrays = {
        "layer.weight": np.arange(6, dtype="<f8").reshape(2, 3),
        "layer.\u00fc": np.array(1.5, "<f4"),
        "empty": np.zeros((0, 7), "<f4"),
        "mask": np.array([True, False, True]),
    }
    codes = {"<f8": "F64", "<f4": "F32", "|b1": "BOOL"}
    head, _ = header.encode_header(
        ((key, codes[a.dtype.str], a.shape, a.nbytes) for key, a in arrays.items()),
        metadata={"format": "pt", "run": "a"},
    )
    part = tmp_path / "model.safetensors"
    part.write_bytes(head + b"".join(a.tobytes() for a in arrays.values()))
    with safe_open(part, framework="np") as opened:
        assert opened.metadata() == {"format": "pt", "run": "a"}
        assert set(opened.keys()) == set(arrays)
        for key, expected in arrays.items():
            found = opened.get_tensor(key)
            assert found.shape == expected.shape
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("code", sorted(header.ITEM_SIZES))
def test_plain_safetensors_knows_every_dtype(tmp_path, code):
    """A code or an element size of our own would make the whole part unreadable."""
    num_bytes = 3 * header.ITEM_SIZES[code]
    head, _ = header.encode_header([("t", code, (3,), num_bytes)])
    part = tmp_path / "t.safetensors"
    part.write_bytes(head + bytes(num_bytes))
    with safe_open(part, framework="np") as opened:
        assert opened.get_slice("t").get_dtype() == code
        assert opened.get_slice("t").get_shape() == [3]


def test_part_of_plain_safetensors_is_read():
    """Weights written by others come in through the same parser."""
    data = save({"b": np.arange(4, dtype="<i4"), "a": np.ones((2, 2), "<f2")}, {"k": "v"})
    length = header.parse_header_length(data[:8], size_bytes=len(data), where="part")
    parsed = header.parse_header(data[8 : 8 + length], size_bytes=len(data), where="part")
    assert data[parsed["b"].start : parsed["b"].stop] == np.arange(4, dtype="<i4").tobytes()
    assert parsed["a"].shape == (2, 2)


@pytest.mark.parametrize(
    "tensors",
    [
        [("t", "U8", (1,), 1), ("t", "U8", (1,), 1)],
        [("__metadata__", "U8", (1,), 1)],
        [("t" * 4097, "U8", (1,), 1)],
    ],
    ids=["twice", "reserved", "long"],
)
def test_name_that_could_not_be_read_back_is_not_written(tensors):
    """Refused while saving; on loading it would be too late."""
    with pytest.raises(FormatError, match="another name"):
        header.encode_header(tensors)


@pytest.mark.parametrize(
    ("first", "size_bytes"),
    [
        (b"", 0),
        (b"\x02\0\0\0", 100),
        ((0).to_bytes(8, "little"), 100),
        ((1).to_bytes(8, "little"), 100),
        ((93).to_bytes(8, "little"), 100),
        ((2**64 - 1).to_bytes(8, "little"), 100),
        ((2**63).to_bytes(8, "little"), 2**62),
        ((64 * 2**20 + 1).to_bytes(8, "little"), 2**40),
        (b"PK\x03\x04\x14\0\0\0", 2**40),
    ],
)
def test_hostile_length_is_refused(first, size_bytes):
    """The length decides how much is read into memory."""
    with pytest.raises(FormatError):
        header.parse_header_length(first, size_bytes=size_bytes, where="part")


def test_longest_length_that_fits_is_taken():
    """The border itself is valid: a file that is nothing but a header."""
    assert header.parse_header_length((92).to_bytes(8, "little"), size_bytes=100, where="p") == 92


@pytest.mark.parametrize(
    ("head", "data_bytes"),
    [
        pytest.param(b"[]", 0, id="no table"),
        pytest.param(b"{", 0, id="torn"),
        pytest.param(b'{"a":1,"a":2}', 0, id="key twice"),
        pytest.param(table(t=1), 0, id="no entry"),
        pytest.param(table(t={"dtype": "U8", "shape": [4]}), 4, id="no offsets"),
        pytest.param(table(t={**entry(), "more": 1}), 4, id="unknown field"),
        pytest.param(table(t=entry("U7")), 4, id="unknown dtype"),
        pytest.param(table(t=entry(["U8"])), 4, id="dtype is a list"),
        pytest.param(table(t=entry(shape=4)), 4, id="shape is no list"),
        pytest.param(table(t=entry(shape=[-4])), 4, id="negative size"),
        pytest.param(table(t=entry(shape=[-2, -2])), 4, id="negative sizes"),
        pytest.param(table(t=entry(shape=[4.0])), 4, id="fraction"),
        pytest.param(table(t=entry(shape=["4"])), 4, id="text"),
        pytest.param(table(t=entry(shape=[True, 4])), 4, id="bool as int"),
        pytest.param(table(t=entry(offsets=[False, 4])), 4, id="bool as offset"),
        pytest.param(table(t=entry(shape=[2**64])), 4, id="huge size"),
        pytest.param(table(t=entry(shape=[2**62, 2**62], offsets=[0, 2**62])), 4, id="overflow"),
        pytest.param(table(t=entry(shape=[1] * 65, offsets=[0, 1])), 1, id="rank bomb"),
        pytest.param(table(t=entry(offsets=[4, 0])), 4, id="backwards"),
        pytest.param(table(t=entry(offsets=[-4, 0])), 4, id="before the data"),
        pytest.param(table(t=entry(offsets=[0])), 4, id="one offset"),
        pytest.param(table(t=entry(offsets=[0, 4, 8])), 4, id="three offsets"),
        pytest.param(table(t=entry(offsets=[0, 3])), 3, id="smaller than its shape"),
        pytest.param(table(t=entry(shape=[3])), 4, id="larger than its shape"),
        pytest.param(table(t=entry()), 3, id="past the end"),
        pytest.param(table(t=entry()), 5, id="bytes left over"),
        pytest.param(table(t=entry(offsets=[1, 5])), 5, id="gap in front"),
        pytest.param(table(a=entry(), b=entry(offsets=[5, 9])), 9, id="gap"),
        pytest.param(table(a=entry(), b=entry(offsets=[3, 7])), 7, id="overlap"),
        pytest.param(table(a=entry(), b=entry()), 4, id="same bytes twice"),
        pytest.param(table(a=entry(), b=entry(shape=[0], offsets=[2, 2])), 4, id="empty inside"),
        pytest.param(table(**{"t" * 4097: entry()}), 4, id="long name"),
    ],
)
def test_hostile_header_is_refused(head, data_bytes):
    """Every entry must tile the data exactly, or two readers would disagree on the bytes."""
    with pytest.raises(FormatError):
        parse(head, data_bytes)


def test_names_are_data_and_never_paths():
    """A tensor may be called anything; it is only ever a key of a dict."""
    parsed = parse(table(**{"../../etc/passwd\0": entry()}), 4)
    assert list(parsed) == ["../../etc/passwd\0"]


def test_many_small_entries_are_parsed():
    """Tens of thousands of tensors in one header are a large model, not an attack."""
    entries = {f"t{i}": entry("U8", [1], [i, i + 1]) for i in range(20_000)}
    assert len(parse(table(**entries), 20_000)) == 20_000


ENTRY = '"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
ESCAPED = ENTRY.replace("dtype", "\\u0064type")
TOO_MANY = header.MAX_TENSORS + 1


def joined(unit: str, count: int) -> bytes:
    return ("{" + ",".join(unit % number for number in range(count)) + "}").encode()


@pytest.mark.parametrize(
    ("unit", "count"),
    [
        (ENTRY, 1_000_000),
        (ESCAPED, 1_000_000),
        ('"%x":1', 4_000_000),
        ('"%x":[[[[[[]]]]]]', 500_000),
        ('"%x":[' + "1.5," * 200 + "1]", 50_000),
    ],
    ids=["tensors", "escaped", "pairs", "lists", "numbers"],
)
def test_a_header_bomb_is_not_parsed(monkeypatch, unit, count):
    """Its 50 MiB would become gigabytes of objects before the first entry is looked at."""
    monkeypatch.setattr(header.canonical, "load", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(FormatError, match="more than the 200,000 tensors"):
        parse(joined(unit, count), 0)


def test_one_tensor_too_many_is_refused_however_it_is_spelt():
    """The look at the marks is rough; the count of the entries is exact."""
    with pytest.raises(FormatError, match="more than the 200,000 tensors"):
        parse(joined(ESCAPED, TOO_MANY), 0)


def test_what_would_not_be_read_is_not_written():
    """The refusal must come while the state is still in memory."""
    rows = ((f"{number:x}", "U8", (0,), 0) for number in range(TOO_MANY))
    with pytest.raises(FormatError, match="Split the state"):
        header.encode_header(rows)


def test_the_largest_part_is_read():
    """With names that hold the marks of JSON themselves."""
    names = (f'a:b[{number:x}]{{,,"' for number in range(header.MAX_TENSORS))
    head, _ = header.encode_header((name, "U8", (0, 1, 1, 1), 0) for name in names)
    assert len(parse(head[8:], 0)) == header.MAX_TENSORS


def test_what_a_reader_would_refuse_is_not_written() -> None:
    """A part of many tensors of many dimensions must fail when it is saved, not when it is read."""
    shape = (1,) * 60
    with pytest.raises(FormatError, match="dimensions"):
        header.encode_header((f"t{n}", "U8", shape, 1) for n in range(60_000))
