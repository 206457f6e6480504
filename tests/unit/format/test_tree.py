"""Nested Python state and its JSON form."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import pathlib
import random
import struct
import sys
from typing import NamedTuple

import numpy as np
import pytest

from milepost.errors import FormatError, UnsupportedStateError, UsageError
from milepost.format import tree


def there_and_back(value, *, sink=None, resolver=None):
    """Through the text of a file, not only through the tree in memory."""
    text = json.dumps(tree.encode(value, sink=sink), allow_nan=False)
    return tree.decode(json.loads(text), resolver=resolver)


def same(left, right) -> bool:
    """Equal in type and in bytes, all the way down. The oracle of this file."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, np.ndarray | np.generic):
        return (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        )
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) for a, b in zip(left.items(), right.items(), strict=True)
        )
    if isinstance(left, list | tuple | collections.deque):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


VALUES = [
    None,
    True,
    0,
    -(2**200),
    1.5,
    -0.0,
    5e-324,
    float("inf"),
    float("-inf"),
    struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0],
    "",
    "\u00fc\0\ud800",
    [],
    {},
    {"$": "tuple", "v": [1]},
    {1: "x", "1": "y"},
    {(1, 2): None, None: 0, 1.5: 1, b"k": 2},
    (),
    (1, (2, [3, ()])),
    {1, 2},
    frozenset({"a"}),
    {None, "a", 1, (1, None), (1, 2)},
    {frozenset({1}), frozenset({2})},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter({"b": 3, "a": 1}),
    collections.deque([1, 2], maxlen=3),
    collections.deque(),
    b"\x00\xff",
    bytearray(b"ab"),
    complex(1.5, float("-inf")),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    datetime.timedelta(days=-1, seconds=5, microseconds=7),
    range(3, -10, -2),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/a/b"),
    pathlib.PureWindowsPath("C:\\a\\b"),
    pathlib.PureWindowsPath("\\\\?\\C:\\x y"),
    pathlib.PureWindowsPath("\\\\host\\share\\x"),
]


LARGE = 1 << 20_000


@pytest.mark.parametrize(
    "value",
    [LARGE, -LARGE, {LARGE: 1}, {LARGE, 1}, range(LARGE), range(-LARGE, LARGE, LARGE - 1)],
    ids=["int", "negative", "key", "set", "range", "step"],
)
def test_ints_beyond_the_limit_of_digits_come_back(value):
    """Python refuses to write or read more than 4,300 decimal digits."""
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("bits", [2047, 2048, 2049])
def test_ints_need_no_more_digits_than_any_limit_allows(bits):
    """The limit can be set as low as 640 digits in the process that loads."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        found = there_and_back([(1 << bits) - 1, -(1 << bits)])
    finally:
        sys.set_int_max_str_digits(before)
    assert found == [(1 << bits) - 1, -(1 << bits)]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: ascii(v)[:40])
def test_value_comes_back_in_kind_and_bits(value):
    """Each row of the table in the module's docstring."""
    assert same(there_and_back(value), value)
    assert same(there_and_back([value, {"k": value}]), [value, {"k": value}])


NUMPY = [
    np.float64(0.1),
    np.int64(5),
    np.bool_(True),
    np.float16("nan"),
    np.complex64(1 - 2j),
    np.longdouble("1.1"),
    np.str_("\u00fc"),
    np.str_(""),
    np.str_("a\0"),
    np.bytes_(b"a\0\0"),
    np.bytes_(b""),
    np.datetime64("2024-02-29T01:02", "ns"),
    np.datetime64("NaT"),
    np.timedelta64(7, "m"),
    np.arange(3),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.array(1.5),
    np.zeros((0, 4), "f4"),
    np.array(["a", "bcd"]),
    np.array([b"a"]),
    np.array([True, False]),
    np.array(["2024-01-01", "NaT"], "M8[25s]"),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::-3],
]


@pytest.mark.parametrize("value", NUMPY, ids=lambda v: ascii(v)[:40])
def test_numpy_value_comes_back_in_dtype_shape_and_bytes(value):
    """Metrics and loaders are full of numpy scalars; safe loaders elsewhere reject them."""
    assert same(there_and_back(value), value)


def test_array_comes_back_writable_and_owned():
    """State is updated in place by what it is restored into."""
    array = there_and_back(np.arange(3))
    array[0] = 7
    assert array.tolist() == [7, 1, 2]


def test_state_of_a_real_callback_comes_back():
    """The values that made resumes of other tools fail hours after a save that worked."""
    state = {
        "best": np.float64(0.1),
        "count": np.int64(5),
        "window": np.arange(3),
        "numpy_rng": np.random.RandomState(3).get_state(),
        "python_rng": random.Random(3).getstate(),
        "path": pathlib.Path("a/b"),
        "ordered": collections.OrderedDict(z=1, a=2),
        "nested": [1, (2, (3,)), None],
        "names": {1: "x"},
    }
    again = there_and_back(state)
    assert same(again, state)
    random.Random().setstate(again["python_rng"])
    np.random.RandomState().set_state(again["numpy_rng"])


class Thing:
    pass


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        Thing,
        len,
        lambda: None,
        Config(),
        Colour.RED,
        Level.LOW,
        Point(1, 2),
        Text("a"),
        collections.defaultdict(list),
        object(),
        iter([]),
        memoryview(b"a"),
        np.array([Thing()], dtype=object),
        pytest.param(np.zeros(2, dtype=[("a", "i4")]), id="records"),
        pytest.param(np.zeros(2, dtype=[("a", "S0")])["a"], id="empty elements"),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.dtype("f4"),
        np.random.default_rng(1),
    ],
    ids=lambda v: type(v).__name__,
)
def test_value_without_a_form_is_refused_by_its_path(value):
    """At save time, naming the place; never dropped, never turned into something close to it."""
    state = {"callbacks": {"EMA": {"shadow": [0, (value,)]}}}
    with pytest.raises(UnsupportedStateError) as caught:
        tree.encode(state, path=("state",))
    path = "state['callbacks']['EMA']['shadow'][1][0]"
    assert caught.value.facts["path"] == path
    assert str(caught.value).startswith(path)
    assert caught.value.hint


def test_unknown_key_is_refused_by_its_path():
    """Keys are stored too, and can be anything hashable."""
    key = Thing()
    with pytest.raises(UnsupportedStateError, match="Thing"):
        tree.encode({"a": {key: 1}})


def test_state_that_holds_itself_is_refused():
    """A cycle has no end; it must not take the interpreter down with it."""
    loop: list = [1]
    loop.append({"again": loop})
    with pytest.raises(UnsupportedStateError, match="holds itself"):
        tree.encode({"state": loop})


WRAPS = {
    "list": lambda v: [v],
    "dict": lambda v: {"k": v},
    "int dict": lambda v: {1: v},
    "ordered": lambda v: collections.OrderedDict(k=v),
    "tuple": lambda v: (v,),
    "deque": lambda v: collections.deque([v]),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_everything_that_can_be_saved_can_be_loaded(wrap):
    """Depth is counted alike both ways, or a save would succeed that no one can read."""
    value: object = 1
    for _ in range(tree.MAX_DEPTH):
        value = wrap(value)
    again = there_and_back(value)
    for _ in range(tree.MAX_DEPTH):
        again = next(iter(again.values() if isinstance(again, dict) else again))
    assert again == 1
    with pytest.raises(UnsupportedStateError):
        tree.encode(wrap(value))


def test_sets_give_the_same_bytes_in_any_order():
    """Text hashes differ between processes; the file must not."""
    names = [f"name{i}" for i in range(50)]
    assert tree.encode(set(names)) == {"$": "set", "v": sorted(names)}


@dataclasses.dataclass(frozen=True)
class Money:
    cents: int


@pytest.fixture
def codecs(monkeypatch):
    """Registrations of one test, forgotten after it."""
    monkeypatch.setattr(tree, "_ENCODERS", {})
    monkeypatch.setattr(tree, "_DECODERS", {})


@pytest.mark.usefixtures("codecs")
class TestCodecs:
    def test_registered_class_comes_back(self):
        """Also as a key, and with anything storable inside."""
        tree.register_codec(
            Money,
            "money",
            encode=lambda m: {"cents": (m.cents,)},
            decode=lambda d: Money(*d["cents"]),
        )
        state = {Money(3): [Money(-1)]}
        assert there_and_back(state) == state

    def test_class_keeps_its_tag(self):
        """One tag for two classes would read one as the other."""
        tree.register_codec(Money, "money", encode=lambda m: m.cents, decode=Money)
        tree.register_codec(Money, "money", encode=lambda m: m.cents, decode=Money)
        with pytest.raises(UsageError, match="Money"):
            tree.register_codec(Thing, "money", encode=lambda t: 0, decode=lambda _: Thing())

    def test_unregistered_tag_says_what_to_do(self):
        """The reading process forgot to register it."""
        with pytest.raises(FormatError, match="register_codec"):
            tree.decode({"$": "custom", "tag": "money", "v": 1})

    def test_codec_that_fails_is_named(self):
        """A caller's KeyError must not look like ours."""
        tree.register_codec(Money, "money", encode=lambda m: m.cents, decode=lambda d: d["cents"].x)
        with pytest.raises(FormatError, match="'money'") as caught:
            tree.decode({"$": "custom", "tag": "money", "v": {"cents": 1}})
        assert isinstance(caught.value.__cause__, AttributeError)

    def test_codec_that_returns_its_own_class_ends(self):
        """An encoder that changes nothing must not recurse for ever."""
        tree.register_codec(Money, "money", encode=lambda m: m, decode=lambda m: m)
        with pytest.raises(UnsupportedStateError):
            tree.encode(Money(1))

    def test_nested_codecs_can_be_read_back_as_deep_as_written(self):
        """Each wrapping counts once on both sides."""
        tree.register_codec(Thing, "thing", encode=lambda t: t.inner, decode=lambda v: [v])
        value: object = 0
        for _ in range(tree.MAX_DEPTH):
            thing = Thing()
            thing.inner = value
            value = thing
        assert str(there_and_back(value)).count("[") == tree.MAX_DEPTH


def test_sink_gets_what_is_not_known_with_its_path():
    """Tensors go this way; the tag comes back to the resolver."""
    kept: list = []

    def sink(path, value):
        if not isinstance(value, Thing):
            return None
        kept.append((path, value))
        return {"$": "kept", "index": len(kept) - 1}

    thing = Thing()
    state = {"a": [1, thing], "b": (thing, {2: thing})}
    tags = tree.encode(state, sink=sink, path=("state",))
    paths = [("state", "a", 1), ("state", "b", 0), ("state", "b", 1, 2)]
    assert [path for path, _ in kept] == paths
    again = tree.decode(json.loads(json.dumps(tags)), resolver=lambda tag: kept[tag["index"]][1])
    assert again["a"][1] is thing
    assert again["b"][1][2] is thing


def test_tag_that_no_one_knows_is_refused():
    """With a resolver or without one."""
    with pytest.raises(FormatError, match="no_such_kind"):
        tree.decode({"$": "no_such_kind"})
    with pytest.raises(FormatError, match="no_such_kind"):
        tree.decode({"$": "no_such_kind"}, resolver=lambda tag: {}[tag["$"]])


@pytest.mark.parametrize(
    "tag",
    [
        {"$": None},
        {"$": 1},
        {"$": []},
        {"$": {}},
        {"$": "builtins.eval", "v": "1"},
        {"$": "tuple"},
        {"$": "tuple", "v": "abc"},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "set", "v": [[]]},
        {"$": "set", "v": None},
        {"$": "dict", "items": ["ab"]},
        {"$": "dict", "items": [[1, 2, 3]]},
        {"$": "dict", "items": [[[], 2]]},
        {"$": "dict", "items": {"a": "bc"}},
        {"$": "dict", "v": [[1, 2]]},
        {"$": "counter", "items": 1},
        {"$": "deque", "v": [1]},
        {"$": "deque", "v": [1], "maxlen": -1},
        {"$": "deque", "v": [1], "maxlen": "2"},
        {"$": "deque", "v": [1], "maxlen": 10**30},
        {"$": "float", "bits": "7ff8"},
        {"$": "float", "bits": 7},
        {"$": "float", "bits": "zzzzzzzzzzzzzzzz"},
        {"$": "bytes", "v": "!!!!"},
        {"$": "bytes", "v": 5},
        {"$": "bytes", "v": "\u00fc"},
        {"$": "bytearray"},
        {"$": "complex", "v": [1]},
        {"$": "complex", "v": ["1", "2"]},
        {"$": "complex", "v": [1, 2, 3]},
        {"$": "date", "v": "yesterday"},
        {"$": "date", "v": 5},
        {"$": "datetime", "v": None},
        {"$": "timedelta", "v": [10**30]},
        {"$": "timedelta", "v": "123"},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0.5]},
        {"$": "range", "v": [{"$": "float", "hex": "1"}]},
        {"$": "int"},
        {"$": "int", "hex": 5},
        {"$": "int", "hex": ""},
        {"$": "int", "hex": "0x1f"},
        {"$": "int", "hex": "1_f"},
        {"$": "int", "hex": "01f"},
        {"$": "int", "hex": "-0"},
        {"$": "path", "v": 5},
        {"$": "posix_path", "v": 5},
        {"$": "windows_path"},
        {"$": "custom"},
        {"$": "custom", "tag": [], "v": 1},
        {"$": "numpy"},
        {"$": "numpy", "dtype": "|O", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "numpy", "dtype": "<i3", "shape": [1], "v": "AAAA"},
        {"$": "numpy", "dtype": "<i4", "shape": None, "v": ""},
        {"$": "numpy", "dtype": "<i4", "shape": None, "v": "AAAAAAAAAAA="},
        {"$": "numpy", "dtype": "<i4", "shape": [2], "v": "AAAAAA=="},
        {"$": "numpy", "dtype": "<i4", "shape": [-1], "v": "AAAAAA=="},
        {"$": "numpy", "dtype": "<i4", "shape": [True], "v": "AAAAAA=="},
        {"$": "numpy", "dtype": "<i4", "shape": "1", "v": "AAAAAA=="},
        {"$": "numpy", "dtype": "<i4", "shape": [0] * 100, "v": ""},
        {"$": "numpy", "dtype": "<i4", "shape": [0, 2**70], "v": ""},
        {"$": "numpy", "dtype": "|S0", "shape": [2**40], "v": ""},
        {"$": "numpy", "dtype": "<U999999999", "shape": [2**40], "v": ""},
        {"$": "numpy", "dtype": "<M8[zz]", "shape": [0], "v": ""},
        {"$": "numpy", "dtype": "<U2", "shape": None, "v": "AAAA"},
        {"$": "numpy", "dtype": ["<i4"], "shape": [], "v": ""},
    ],
    ids=lambda tag: ascii(tag)[:60],
)
def test_malformed_tag_is_a_format_error(tag):
    """A stranger's file may hold any JSON; only one kind of error may come of it."""
    with pytest.raises(FormatError):
        tree.decode({"a": [tag]})


def test_deep_file_is_refused():
    """Deeper than any state that was ever saved."""
    deep: object = 1
    for _ in range(tree.MAX_DEPTH + 10):
        deep = {"$": "tuple", "v": [deep]}
    with pytest.raises(FormatError, match="deeper"):
        tree.decode(deep)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "state"),
        (("callbacks",), "callbacks"),
        (("callbacks", "EMA", "shadow", 3), "callbacks['EMA']['shadow'][3]"),
        (("model", 1, (2, 3)), "model[1][(2, 3)]"),
    ],
)
def test_path_reads_as_python(path, text):
    """So that it can be pasted behind the state."""
    assert tree.path_text(path) == text
