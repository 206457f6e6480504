"""Read a pickle as data: what it asks to be made is noted, and nothing is made or called.

A pickle is a program for a small stack machine, and two of its instructions call what it names. So
it is never given to Python's own reader here. This one knows the instructions of which plain data
and simple objects consist; a call becomes a :class:`Made` with the name and the arguments. Names
that the caller does not expect are refused as soon as they are met.

It uses no recursion, so that nesting without measure costs nothing but the memory of the nest, and
makes at most one container for every few bytes of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError, UnsupportedStateError

__all__ = ["Made", "Named", "Persistent", "read_pickle"]

_FREE_CONTAINERS = 10_000
_BYTES_PER_CONTAINER = 3


@dataclass(frozen=True, slots=True)
class Named:
    """A name that a pickle refers to.

    Attributes:
        name: Module and name, joined by a dot.
    """

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """An object that a pickle asks to be made.

    Attributes:
        name: What is to make it.
        arguments: What it is to be made of.
        state: What it is to be given afterwards.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something that lies outside of the pickle.

    Attributes:
        identity: What the pickle calls it.
    """

    identity: Any


def read_pickle(data: bytes, *, allowed: Collection[str], where: str) -> Any:
    """Read a pickle as plain data, :class:`Named`, :class:`Made` and :class:`Persistent`.

    Args:
        data: The pickle, of protocol 2 to 5.
        allowed: The names that it may refer to.
        where: What it was read from, for messages.

    Raises:
        UnsupportedStateError: It refers to another name. Nothing of it was run.
        FormatError: It is no pickle of data, or damaged.
    """
    try:
        return _Reader(data, allowed, where).read()
    except (IndexError, TypeError, ValueError, struct.error, KeyError) as error:
        if isinstance(error, FormatError | UnsupportedStateError):
            raise
        raise FormatError(f"{where} is damaged: {error!r}.", path=where) from error


class _Mark:
    """Stands on the stack where a group of values begins."""


_MARK = _Mark()
_KEYS = (str, int, bytes, bool, type(None), Made)


class _Reader:
    def __init__(self, data: bytes, allowed: Collection[str], where: str) -> None:
        self._data = data
        self._allowed = allowed
        self._where = where
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._room = _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER

    def read(self) -> Any:
        data, steps = self._data, _STEPS
        while True:
            step = steps.get(data[self._at])
            if step is None:
                if data[self._at : self._at + 1] == b".":
                    (value,) = self._stack
                    return value
                raise self._damaged(f"it holds the instruction {data[self._at]:#x}")
            self._at += 1
            step(self)

    def _damaged(self, reason: str) -> FormatError:
        return FormatError(
            f"{self._where} is not a pickle of plain data, or it is damaged: {reason}.",
            safe="Nothing of it was run.",
            path=self._where,
        )

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            raise self._damaged("it ends too early")
        self._at += count
        return found

    def _skip(self, count: int) -> None:
        self._take(count)

    def _number(self, code: str) -> int:
        (value,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return int(value)

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode("utf-8")

    def _new(self, value: Any) -> None:
        self._room -= 1
        if self._room < 0:
            raise self._damaged("it expands out of all proportion")
        self._stack.append(value)

    def _pop_mark(self) -> list[Any]:
        stack, index = self._stack, len(self._stack) - 1
        while stack[index] is not _MARK:  # an IndexError if there is none
            index -= 1
            if index < 0:
                raise self._damaged("a group of values has no beginning")
        found = stack[index + 1 :]
        del stack[index:]
        return found

    def _text(self, code: str) -> None:
        self._stack.append(self._take(self._number(code)).decode("utf-8", "surrogatepass"))

    def _bytes(self, code: str) -> None:
        self._stack.append(self._take(self._number(code)))

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _float(self) -> None:
        (value,) = struct.unpack(">d", self._take(8))
        self._stack.append(value)

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _tuple(self, count: int) -> None:
        found = tuple(self._stack[-count:])
        if len(found) != count:
            raise self._damaged("a group of values is too short")
        del self._stack[-count:]
        self._new(found)

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise self._damaged("something is appended to what is no list")
        target.extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise self._damaged("something is set in what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in _KEYS:  # the hash of a deep tuple would use up the C stack
                raise self._damaged("a dict has a key that is neither text, number nor object")
            target[key] = value

    def _name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if type(module) is not str or type(name) is not str or full not in self._allowed:
            raise UnsupportedStateError(
                f"{self._where} holds more than data: it wants to use {full[:120]}.",
                safe="Nothing of it was run.",
                path=self._where,
                refused=full[:120],
            )
        self._stack.append(Named(full))

    def _call(self) -> None:
        arguments, what = self._stack.pop(), self._stack.pop()
        if type(what) is not Named or type(arguments) is not tuple:
            raise self._damaged("it calls what has no name")
        if what.name == "collections.OrderedDict" and not arguments:
            self._new({})
        else:
            self._new(Made(what.name, arguments))

    def _build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if type(made) is not Made or made.state is not None:
            raise self._damaged("it changes what it has not made")
        made.state = state

    def _persistent(self) -> None:
        self._new(Persistent(self._stack.pop()))


def _push(*, value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader._stack.append(value)


_Step = Callable[[_Reader], None]


def _steps() -> dict[int, _Step]:
    # ruff: noqa: SLF001 - the instructions are methods of the reader above
    steps: dict[bytes, _Step] = {
        b"\x80": lambda r: r._skip(1),  # the protocol
        b"\x95": lambda r: r._skip(8),  # the length of a frame
        b"(": _push(value=_MARK),
        b"N": _push(value=None),
        b"\x88": _push(value=True),
        b"\x89": _push(value=False),
        b")": _push(value=()),
        b"]": lambda r: r._new([]),
        b"}": lambda r: r._new({}),
        b"K": lambda r: r._stack.append(r._number("<B")),
        b"M": lambda r: r._stack.append(r._number("<H")),
        b"J": lambda r: r._stack.append(r._number("<i")),
        b"\x8a": lambda r: r._long(),
        b"G": lambda r: r._float(),
        b"\x8c": lambda r: r._text("<B"),
        b"X": lambda r: r._text("<I"),
        b"\x8d": lambda r: r._text("<Q"),
        b"C": lambda r: r._bytes("<B"),
        b"B": lambda r: r._bytes("<I"),
        b"\x94": lambda r: r._put(len(r._memo)),
        b"q": lambda r: r._put(r._number("<B")),
        b"r": lambda r: r._put(r._number("<I")),
        b"h": lambda r: r._stack.append(r._memo[r._number("<B")]),
        b"j": lambda r: r._stack.append(r._memo[r._number("<I")]),
        b"t": lambda r: r._new(tuple(r._pop_mark())),
        b"\x85": lambda r: r._tuple(1),
        b"\x86": lambda r: r._tuple(2),
        b"\x87": lambda r: r._tuple(3),
        b"a": lambda r: r._append([r._stack.pop()]),
        b"e": lambda r: r._append(r._pop_mark()),
        b"s": lambda r: r._set([r._stack.pop(), r._stack.pop()][::-1]),
        b"u": lambda r: r._set(r._pop_mark()),
        b"c": lambda r: r._name(r._line(), r._line()),
        b"\x93": lambda r: r._name(*[r._stack.pop(), r._stack.pop()][::-1]),
        b"R": lambda r: r._call(),
        b"\x81": lambda r: r._call(),
        b"b": lambda r: r._build(),
        b"Q": lambda r: r._persistent(),
    }
    return {code[0]: step for code, step in steps.items()}


_STEPS = _steps()
