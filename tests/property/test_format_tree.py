"""Laws of the tree: everything comes back, and nothing hostile gets further than an error."""

from __future__ import annotations

import datetime
import json
import pathlib
import struct
from collections import Counter, OrderedDict, deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError
from milepost.format import tree

TEXT = st.text(max_size=8)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.binary(max_size=8),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.timedeltas(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    TEXT.map(lambda text: pathlib.Path("a") / text.replace("\0", "").replace("/", "_")),
)
KEYS = st.recursive(
    HASHABLE,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
DTYPES = st.sampled_from(
    ["?", "i1", "<i4", ">i8", "<u2", "<f2", ">f8", "c8", "<U3", "S2", "<M8[s]"]
)


@st.composite
def arrays(draw) -> np.ndarray:
    """Any bytes are an array of any plain dtype, NaN payloads included."""
    dtype = np.dtype(draw(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":
        letters = draw(st.lists(TEXT, min_size=count, max_size=count))
        return np.array([text[:3] for text in letters], dtype).reshape(shape)
    size_bytes = count * dtype.itemsize
    data = draw(st.binary(min_size=size_bytes, max_size=size_bytes))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape)


SCALARS = st.one_of(
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    TEXT.map(np.str_),
    st.binary(max_size=4).map(np.bytes_),
)
VALUES = st.recursive(
    HASHABLE | arrays() | SCALARS | st.binary(max_size=8).map(bytearray),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.builds(deque, st.lists(inner, max_size=3), st.integers(0, 5)),
        st.dictionaries(TEXT | st.just("$"), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=12,
)


def plain(value):
    """Spell a value out so that equal spellings mean equal kinds and equal bits.

    The oracle: it knows nothing of tags.
    """
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if kind is datetime.datetime:
        return kind, value.replace(tzinfo=None), value.utcoffset()
    if isinstance(value, np.ndarray | np.generic):
        size = len(value) if isinstance(value, str | bytes) else None
        return kind, value.dtype.str, value.shape, value.tobytes(), size
    if isinstance(value, dict):
        return kind, [(plain(key), plain(part)) for key, part in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted((plain(part) for part in value), key=repr)
    if isinstance(value, deque):
        return kind, value.maxlen, [plain(part) for part in value]
    if isinstance(value, list | tuple):
        return kind, [plain(part) for part in value]
    return kind, value


@given(VALUES)
def test_every_value_comes_back_in_kind_and_bits(value):
    """Through text, as it lies in the file."""
    text = json.dumps(tree.encode(value), allow_nan=False)
    assert plain(tree.decode(json.loads(text))) == plain(value)


@given(VALUES)
def test_decoded_value_encodes_to_the_same_tree(value):
    """A checkpoint that is loaded and saved again is the same checkpoint."""
    first = tree.encode(value)
    assert tree.encode(tree.decode(first)) == first


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CONTAINERS = ["dict", "ordered_dict", "counter", "tuple", "set", "frozenset", "deque"]
LEAVES = ["float", "bytes", "bytearray", "complex", "numpy", "date", "datetime", "timedelta"]
TAG_NAMES = st.sampled_from([*CONTAINERS, *LEAVES, "path", "range", "custom", "tensor"])
FIELDS = st.sampled_from(["v", "items", "bits", "maxlen", "dtype", "shape", "tag"])
CODES = st.from_regex(r"[<>|=][a-zA-Z][0-9]{0,3}(\[[a-z0-9]{0,4}\])?", fullmatch=True)
SHAPES = st.none() | st.lists(st.integers(-2, 4) | st.integers(), max_size=5)
BASE64 = st.sampled_from(["", "AAAA", "AAAAAAAAAAA=", "/////////38=", "A", "!"])
TAGS = st.one_of(
    st.dictionaries(FIELDS, JSON | BASE64, max_size=4).flatmap(
        lambda fields: TAG_NAMES.map(lambda name: {"$": name, **fields})
    ),
    st.builds(
        lambda dtype, shape, v: {"$": "numpy", "dtype": dtype, "shape": shape, "v": v},
        CODES | TEXT,
        SHAPES,
        BASE64,
    ),
)
HOSTILE = st.recursive(
    JSON | TAGS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(lambda name, v: {"$": name, "v": [v]}, TAG_NAMES, inner),
        st.builds(lambda name, k, v: {"$": name, "items": [[k, v]]}, TAG_NAMES, inner, inner),
    ),
    max_leaves=6,
)


@given(HOSTILE)
def test_any_json_decodes_or_is_a_format_error(value):
    """What decodes is made of known kinds only, so it encodes again, to the same value."""
    try:
        found = tree.decode(value)
    except FormatError:
        return
    assert plain(tree.decode(tree.encode(found))) == plain(found)
