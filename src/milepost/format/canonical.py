"""Canonical JSON, both ways, and sealed records.

Bytes that we write are always the same for the same value: sorted keys, no spaces, ASCII, no NaN.
Bytes that we read may come from anyone: size, depth and duplicate keys are checked, and nothing but
plain JSON values comes out.

A *record* is a small JSON object (manifest, session, pin, ...) sealed with the SHA-256 of its own
canonical bytes, so that a torn or altered record is told from a whole one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from ..collecting import no_collecting
from ..errors import DamagedError, FormatError

__all__ = ["MAX_JSON_BYTES", "dump", "dump_record", "load", "load_record"]

MAX_JSON_BYTES = 256 * 1024 * 1024
"""Largest JSON document that is parsed, in bytes. An index of 1,000,000 tensors is about 150 MB."""

_LARGE_CHARS = 64 * 1024

_SEAL = "digest"


def dump(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value.

    Raises:
        FormatError: The value holds NaN, an infinity, or something that JSON has no form for.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"A record could not be written as JSON: {error}.") from error
    return text.encode("ascii")


def load(
    data: bytes,
    *,
    where: str,
    max_bytes: int = MAX_JSON_BYTES,
    num_keys: Callable[[Any], int] | None = None,
) -> Any:
    """Parse untrusted JSON.

    Args:
        data: The bytes.
        where: What they were read from, for the error message.
        max_bytes: Refuse longer input without parsing it.
        num_keys: Returns how many keys the objects in the value have, or fewer, faster than it is
            found out for any value.

    Raises:
        FormatError: Too long, too deep, not UTF-8, not JSON, a duplicate key, or a number that
            is not finite.
    """
    if len(data) > max_bytes:
        raise FormatError(
            f"{where} holds {len(data):,} bytes of JSON; at most {max_bytes:,} are read.",
            path=where,
        )
    try:
        # Decoded here: json.loads would also take UTF-16, UTF-32 and lone surrogates.
        text = data.decode("utf-8")
        if len(text) > _LARGE_CHARS:
            with no_collecting():
                value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
                if _is_all_of(text, value, num_keys or _num_keys):
                    return value
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError as error:
        raise FormatError(f"{where} nests its JSON too deeply.", path=where) from error
    except ValueError as error:
        raise FormatError(f"{where} is not valid JSON: {error}.", path=where) from error


def dump_record(fields: Mapping[str, Any]) -> bytes:
    """Seal a record: its canonical bytes with their own SHA-256 added as ``digest``."""
    body = dict(fields)
    body.pop(_SEAL, None)
    body[_SEAL] = hashlib.sha256(dump(body)).hexdigest()
    return dump(body) + b"\n"


def load_record(data: bytes, *, where: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Open a sealed record and return its fields, the seal removed.

    Raises:
        FormatError: Not JSON, or not an object.
        DamagedError: The seal is missing or does not match the fields.
    """
    try:
        body = load(data, where=where, max_bytes=max_bytes)
    except FormatError as error:
        raise DamagedError(f"{where} is torn or altered: {error.what}", path=where) from error
    if not isinstance(body, dict):
        raise DamagedError(f"{where} is not a record.", path=where)
    seal = body.pop(_SEAL, None)
    if seal is None or seal != hashlib.sha256(dump(body)).hexdigest():
        raise DamagedError(
            f"{where} does not match its own digest: it is torn or was altered.", path=where
        )
    if data != dump({**body, _SEAL: seal}) + b"\n":
        raise DamagedError(f"{where} is not in canonical form: it was altered.", path=where)
    return body


def _is_all_of(text: str, value: Any, num_keys: Callable[[Any], int]) -> bool:
    """Return whether every key of a text is among what was parsed from it.

    Then none stood twice in one object, which is found out in this way without a call for each.
    There are as many colons as keys, and more if there are any in strings. So if there are as many
    as keys that were parsed, none was lost. Of other texts it is seen whether they are what would
    be written for the value, and of the rest it has to be found out object by object.
    """
    if text.count(":") == num_keys(value):
        return True
    return json.dumps(value, separators=(",", ":")) == text.rstrip(" ")


def _num_keys(value: Any) -> int:
    """Return how many keys all objects in a value have together."""
    count, level = 0, [value]
    while level:
        # Most levels are of one kind, and the last ones have no objects and no arrays.
        kinds = set(map(type, level))
        inside: list[Iterable[Any]] = []
        if dict in kinds:
            objects = level if len(kinds) == 1 else [one for one in level if type(one) is dict]
            count += sum(map(len, objects))
            inside.append(chain.from_iterable(map(dict.values, objects)))
        if list in kinds:
            arrays = level if len(kinds) == 1 else [one for one in level if type(one) is list]
            inside.append(chain.from_iterable(arrays))
        level = list(chain.from_iterable(inside))
    return count


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return result


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is too large for a number")
    return value
