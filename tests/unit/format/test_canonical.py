"""Canonical JSON and sealed records."""

from __future__ import annotations

import hashlib
import json

import pytest

from milepost.errors import CheckpointError, DamagedError, FormatError
from milepost.format import canonical

RECORD = {"name": "ep1", "values": [1, 2.5, None, True], "nested": {"b": "\u00fc", "a": []}}


def test_same_value_gives_same_bytes():
    """Digests are taken over these bytes, so the order of insertion must not show."""
    assert canonical.dump({"b": 1, "a": [1.5, "\u00fc"]}) == b'{"a":[1.5,"\\u00fc"],"b":1}'
    assert canonical.dump({"a": [1.5, "\u00fc"], "b": 1}) == b'{"a":[1.5,"\\u00fc"],"b":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), b"x", {1, 2}])
def test_value_without_json_form_is_refused(value):
    """A NaN would be written as text that other readers reject."""
    with pytest.raises(FormatError):
        canonical.dump({"loss": value})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}{}",
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b'{"a":1,"a":2}',
        b'{"x":{"a":1,"b":2,"a":1}}',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        b'"\xed\xa0\x80"',
        b"\x00",
        b"1" * 10_000,
    ],
    ids=repr,
)
def test_text_that_is_not_plain_json_is_refused(text):
    """Two readers must never understand one record differently."""
    with pytest.raises(FormatError, match="somewhere"):
        canonical.load(text, where="somewhere")


@pytest.mark.parametrize(
    "inner",
    [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'{"a":1,"a":2}',
        b'{"a":1,"a":1}',
        b'[{"b":[{"x":{},"x":{}}]}]',
        b'{"\\u0061":1,"a":1}',
        b'"\xed\xa0\x80"',
    ],
    ids=repr,
)
@pytest.mark.parametrize("space", [b"", b" ", b"\n"], ids=repr)
def test_a_large_text_is_held_to_the_same_rules(inner, space):
    """It is parsed in another way, for there may be 100,000 objects in it."""
    many = b",".join(b'{"n":%d}' % n for n in range(20_000))
    for text in (b'{"many":[%s],"inner":%s}', b'{"inner":%s,"many":[%s]}'):
        parts = (many, inner) if text.startswith(b'{"many') else (inner, many)
        with pytest.raises(FormatError, match="somewhere"):
            canonical.load(space + text % parts + space, where="somewhere")


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_large_text_is_read_however_it_was_written(indent, ascii_only):
    """Headers and indexes of other writers have spaces, and letters as they are."""
    value = {f"k\u00fc{n}": [n, -0.0, 1e-7, 12345678901234567890, None, {}] for n in range(9_000)}
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    found = canonical.load(text, where="somewhere")
    assert found == value
    assert json.dumps(found) == json.dumps(value)


@pytest.mark.parametrize("bomb", [b"[" * 200_000, b'{"a":' * 200_000], ids=["lists", "objects"])
def test_nesting_bomb_is_refused(bomb):
    """200 kB of brackets must end in an error, not in a dead interpreter."""
    with pytest.raises(FormatError):
        canonical.load(bomb, where="somewhere")


def test_longer_than_allowed_is_refused_unparsed():
    """The cap holds before any memory is spent on parsing."""
    with pytest.raises(FormatError, match="at most 10"):
        canonical.load(b" " * 11, where="somewhere", max_bytes=10)
    assert canonical.load(b"[1,2,3,45]", where="somewhere", max_bytes=10) == [1, 2, 3, 45]


def test_record_comes_back_as_it_was():
    """The seal is added and taken off again."""
    assert canonical.load_record(canonical.dump_record(RECORD), where="r") == RECORD


def test_seal_is_the_digest_of_the_canonical_fields():
    """Anyone can check a record with a JSON parser and sha256 alone."""
    body = json.loads(canonical.dump_record(RECORD))
    seal = body.pop("digest")
    plain = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert seal == hashlib.sha256(plain).hexdigest()


def test_record_seals_itself_anew():
    """A stale seal among the fields is replaced, never sealed in."""
    sealed = canonical.dump_record({**RECORD, "digest": "stale"})
    assert sealed == canonical.dump_record(RECORD)


def test_every_flipped_bit_of_a_record_is_detected():
    """One wrong bit anywhere, the seal and the final newline included."""
    data = canonical.dump_record(RECORD)
    missed = []
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                canonical.load_record(bytes(flipped), where="r")
            except DamagedError:
                continue
            missed.append((position, bit))
    assert missed == []


def test_every_torn_record_is_detected():
    """A crash may leave any prefix on the disk; zeros may follow it."""
    data = canonical.dump_record(RECORD)
    for length in range(len(data)):
        for torn in (data[:length], data[:length].ljust(len(data), b"\0")):
            with pytest.raises(DamagedError):
                canonical.load_record(torn, where="r")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.rstrip(b"\n"),
        lambda data: data + b"\n",
        lambda data: data.replace(b",", b", ", 1),
        lambda data: b" " + data,
        lambda data: json.dumps(json.loads(data), indent=1).encode(),
    ],
    ids=["no newline", "newline", "space inside", "space before", "indented"],
)
def test_record_in_another_form_is_refused(change):
    """The same fields written in another way mean that something else wrote them."""
    with pytest.raises(DamagedError):
        canonical.load_record(change(canonical.dump_record(RECORD)), where="r")


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b"{}", b'{"digest":null}', b'{"digest":1}'])
def test_json_that_is_not_a_record_is_refused(data):
    """A file of another kind under a record's name."""
    with pytest.raises(CheckpointError):
        canonical.load_record(data, where="r")


LARGE = "x" * 70_000
"""Makes a text so long that keys are counted in it."""


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"b":2}',
        '{"a":{"b":[{"c":1},{"c":2},[{"d":{}}]]},"e":"f:g"}',
        '{"a": 1, "b" : 2}',
        '{"a:b":1,"c":":"}',
        '{"a\\"":1,"b\\\\":2,"\\u003a":3}',
        "[1,[2,{}],[]]",
    ],
    ids=["plain", "nested", "blanks", "colons", "escapes", "no keys"],
)
def test_keys_of_a_large_text_are_counted_right(text):
    """Keys are counted by colons, which may also stand in strings."""
    large = f'{{"large":"{LARGE}","inner":{text}}}'
    found = canonical.load(large.encode(), where="it")
    assert found == {"large": LARGE, "inner": json.loads(text)}


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"a":{"b":1,"b":2}}',
        '[[{"a":{},"a":{}}]]',
        '{"a":1,"\\u0061":2}',
        '{"a":1, "a" : 2}',
        '{"a:":1,"a:":2}',
        '{"a\\"":1,"a\\"":2}',
        '{"a":{"b":1},"a":{"b":1,"c":2,"d":3}}',
    ],
    ids=["plain", "nested", "in lists", "spelt", "blanks", "colons", "escapes", "lost inside"],
)
def test_a_key_twice_in_a_large_text_is_refused(text):
    """Two readers could take it for two things."""
    large = f'{{"large":"{LARGE}","inner":{text}}}'
    with pytest.raises(FormatError, match="twice"):
        canonical.load(large.encode(), where="it")
