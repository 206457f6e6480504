"""Parsers of untrusted bytes: any input gives a value or a typed error, never anything else."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milepost.errors import CheckpointError, DamagedError, FormatError
from milepost.format import canonical, header, layout
from milepost.format.manifest import FileEntry, Manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
FINITE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
BYTES = st.one_of(
    st.binary(max_size=60),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.text(alphabet='{}[]",:0123456789.eE+-\\utrfalsn ', max_size=40).map(str.encode),
)


@given(FINITE)
def test_canonical_json_reads_back_and_stays_itself(value):
    """Writing what was read gives the same bytes."""
    data = canonical.dump(value)
    assert canonical.load(data, where="x") == json.loads(data)
    assert canonical.dump(canonical.load(data, where="x")) == data


@given(BYTES)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"-" + b"9" * 5_000)
@example(b"1e400")
def test_any_bytes_are_json_or_a_format_error(data):
    """And what comes out can be written again."""
    try:
        value = canonical.load(data, where="x")
    except FormatError:
        return
    assert canonical.load(canonical.dump(value), where="x") == value


@given(st.dictionaries(st.text(max_size=8), FINITE, max_size=4))
def test_records_open_to_what_was_sealed(fields):
    """Whatever the fields are called, the seal's own name excepted."""
    fields.pop("digest", None)
    assert canonical.load_record(canonical.dump_record(fields), where="r") == fields


@given(
    st.dictionaries(st.text(max_size=8), FINITE, max_size=4),
    st.integers(0),
    st.integers(1, 255),
)
def test_altered_record_is_damaged(fields, position, change):
    """One changed byte in any record of any content."""
    data = bytearray(canonical.dump_record(fields))
    data[position % len(data)] ^= change
    with pytest.raises(DamagedError):
        canonical.load_record(bytes(data), where="r")


SIZES = st.integers(-1, 5) | st.sampled_from([2**31, 2**63, 2**64, True, 1.0, "1", None])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(header.ITEM_SIZES)) | st.just("X") | JSON,
        "shape": st.lists(SIZES, max_size=3) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    }
)
TABLES = st.dictionaries(
    st.text(max_size=8) | st.just("__metadata__"), ENTRIES | JSON, max_size=3
).map(lambda value: json.dumps(value).encode())


@given(TABLES | BYTES, st.integers(0, 40))
def test_any_header_tiles_its_file_or_is_a_format_error(head, data_bytes):
    """What is let through covers every byte of the data exactly once."""
    size_bytes = 8 + len(head) + data_bytes
    try:
        entries = header.parse_header(head, size_bytes=size_bytes, where="part")
    except FormatError:
        return
    covered = sorted(byte for entry in entries.values() for byte in range(entry.start, entry.stop))
    assert covered == list(range(8 + len(head), size_bytes))


@given(st.binary(max_size=12), st.integers(0, 2**63))
def test_any_length_field_is_bounded_or_a_format_error(first, size_bytes):
    """No more is ever read than the file has, nor than the cap."""
    try:
        length = header.parse_header_length(first, size_bytes=size_bytes, where="part")
    except FormatError:
        return
    assert 2 <= length <= min(size_bytes - 8, header.MAX_HEADER_BYTES)


SHAPES = st.lists(st.integers(0, 4), max_size=3)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda key: key != "__metadata__"),
        st.tuples(st.sampled_from(sorted(header.ITEM_SIZES)), SHAPES),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
)
def test_every_layout_reads_back(tensors, metadata):
    """Any names, any shapes, empty ones included."""
    rows = []
    for key, (dtype, shape) in tensors.items():
        num_bytes = header.ITEM_SIZES[dtype]
        for size in shape:
            num_bytes *= size
        rows.append((key, dtype, tuple(shape), num_bytes))
    head, entries = header.encode_header(rows, metadata=metadata)
    size_bytes = len(head) + sum(row[3] for row in rows)
    found = header.parse_header(head[8:], size_bytes=size_bytes, where="part")
    assert {entry.key: entry for entry in entries} == found
    assert [(e.key, e.dtype, e.shape, e.num_bytes) for e in entries] == rows


ODD = st.sampled_from(["X", "F32", True, False, 0, 1, 4, -1, 2**63, 1.0, None, [], [1], [True], {}])


@given(
    st.lists(st.tuples(st.sampled_from(["U8", "F32"]), SHAPES), min_size=1, max_size=4),
    st.none()
    | st.tuples(
        st.integers(0, 3),
        st.sampled_from(["dtype", "shape", "data_offsets", "more", "all"]),
        st.none() | st.integers(0, 2),
        ODD,
    ),
    st.booleans(),
)
def test_all_entries_of_a_header_together_are_read_as_one_by_one(tensors, odd, is_turned):
    """One of them may be wrong in any way, and they may stand in another order than they lie."""
    table, at = {}, 0
    for index, (dtype, shape) in enumerate(tensors):
        size = math.prod(shape) * header.ITEM_SIZES[dtype]
        table[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if odd is not None:
        index, field, place, value = odd
        entry = table[f"t{index % len(tensors)}"]
        if field == "all":
            table[f"t{index % len(tensors)}"] = value
        elif place is not None and isinstance(entry.get(field), list) and entry[field][place:]:
            entry[field][place] = value
        else:
            entry[field] = value
    if is_turned:
        table = dict(reversed(table.items()))
    head = json.dumps(table).encode()

    def outcome():
        try:
            found = header.parse_header(head, size_bytes=8 + len(head) + at, where="part")
        except FormatError as error:
            return str(error)
        return list(found.items())

    with mock.patch.object(header, "_whole_table", return_value=None):
        one_by_one = outcome()
    assert outcome() == one_by_one
    if odd is None:
        assert not isinstance(one_by_one, str)


FILES = st.fixed_dictionaries(
    {
        "path": st.text(max_size=8) | JSON,
        "size": st.integers(-1, 40) | JSON,
        "crc32c": st.text(alphabet="0123456789abcdefgX+", max_size=16) | JSON,
    },
    optional={"linked_from": st.text(max_size=8) | JSON, "more": JSON},
)
WORDS = st.text(max_size=8)
_TREES = ["time", "metrics", "software", "stats", "interval"]
NAMES = st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True)
SOUND = st.fixed_dictionaries(
    {
        "format": st.just(1),
        **dict.fromkeys(["run_id", "write_id", "reason", "layout"], WORDS),
        **dict.fromkeys(["session", "attempt", "world_size"], st.integers()),
        **dict.fromkeys(_TREES, st.dictionaries(WORDS, FINITE)),
        "name": NAMES,
        "parent": st.none() | NAMES,
        "created_s": st.floats(allow_nan=False, allow_infinity=False),
        "is_final": st.booleans(),
        "items": st.lists(WORDS, max_size=2),
        "notes": st.lists(WORDS, max_size=2),
        "files": st.lists(
            st.builds(lambda path: {"path": path, "size": 3, "crc32c": "0000000a"}, NAMES),
            max_size=2,
        ),
    },
)
CHANGES = st.dictionaries(
    st.sampled_from(["format", "name", "parent", "session", "time", "files", "items", "new"]),
    FINITE | st.lists(FILES, max_size=2),
    max_size=2,
)
MANIFESTS = st.builds(lambda sound, changes: {**sound, **changes}, SOUND, CHANGES)


@given(FILES | JSON)
def test_any_file_entry_is_sound_or_a_format_error(entry):
    """A path that stays inside, and a checksum for each block."""
    try:
        found = FileEntry.from_json(entry, where="m")
    except FormatError:
        return
    assert ".." not in found.path.split("/")
    assert FileEntry.from_json(found.to_json(), where="m") == found


@given(MANIFESTS)
def test_any_whole_record_is_a_manifest_or_a_checkpoint_error(body):
    """Sealed properly, with any content: what is let through can be written again."""
    try:
        data = canonical.dump_record(body)
    except FormatError:
        return
    try:
        manifest = Manifest.from_bytes(data, where="m")
    except CheckpointError:
        return
    assert Manifest.from_bytes(manifest.to_bytes(), where="m") == manifest


@given(BYTES)
def test_any_bytes_are_a_manifest_or_damaged(data):
    """A manifest that does not carry its seal was not written by us."""
    with pytest.raises(DamagedError):
        Manifest.from_bytes(data, where="m")


@given(st.text(max_size=300))
def test_any_text_makes_a_valid_name(text):
    """Names are made of metrics and of whatever people call their runs."""
    name = layout.safe_name(text)
    assert layout.check_name(name) == name
    assert layout.safe_name(name) == name
    assert layout.check_key(name, where="r") == name


@given(st.text(max_size=30) | st.from_regex(r"[a./\\:~-]{1,12}", fullmatch=True))
def test_any_key_stays_inside_or_is_a_format_error(key):
    """The oracle walks the path the way a file system does."""
    try:
        layout.check_key(key, where="r")
    except FormatError:
        return
    depth = 0
    for part in key.split("/"):
        assert part not in ("", ".")
        depth += -1 if part == ".." else 1
        assert depth > 0
    assert not any(character in key for character in "\\:\0\n")
