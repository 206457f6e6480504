"""numpy scalars and arrays <-> the tag that stands for them in a tree.

Only dtypes that are plain bytes are known: numbers, booleans, text and times. A dtype that would
need code to read back (objects, records) is refused, and so is a subclass whose extra parts would
be lost (masked arrays).
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedStateError

__all__ = ["decode_array", "encode_array", "is_numpy"]

_DTYPE = re.compile(r"[<>|=][biufcSU][0-9]{1,9}|[<>|=][mM]8(\[[0-9]{0,6}[A-Za-z]{1,3}\])?")


def is_numpy(value: object) -> bool:
    """Tell a numpy value without importing numpy."""
    return any(cls.__module__ == "numpy" for cls in type(value).__mro__)


def encode_array(value: Any, *, where: str) -> dict[str, Any]:
    """Return the tag of a numpy scalar or array.

    Args:
        value: Something for which :func:`is_numpy` holds.
        where: Path to the value, for the message.

    Raises:
        UnsupportedStateError: Not a scalar or plain array, or of a dtype that is not plain bytes.
    """
    import numpy as np

    is_array = type(value) in (np.ndarray, np.memmap)
    if not is_array and not isinstance(value, np.generic):
        raise UnsupportedStateError(
            f"{where} is a numpy {type(value).__qualname__}, which has no form on disk.",
            hint="Store it as a plain array, a number or text.",
            path=where,
            type=f"{type(value).__module__}.{type(value).__qualname__}",
        )
    dtype = value.dtype
    if not _DTYPE.fullmatch(dtype.str) or (is_array and not dtype.itemsize):
        raise UnsupportedStateError(
            f"{where} is a numpy value of dtype {dtype}, which cannot be stored without running "
            "code on load.",
            hint="Use a plain number, text or datetime dtype.",
            path=where,
            type=str(dtype),
        )
    return {
        "$": "numpy",
        "dtype": dtype.str,
        "shape": list(value.shape) if is_array else None,
        "v": base64.b64encode(_plain_bytes(value)).decode("ascii"),
    }


def _plain_bytes(value: Any) -> bytes:
    import numpy as np

    if isinstance(value, np.str_ | np.bytes_) and not len(value):
        return b""  # numpy would give one zero character
    return bytes(value.tobytes())


def decode_array(tag: Mapping[str, Any]) -> Any:
    """Return the scalar or array that a tag stands for.

    Raises:
        ValueError: The tag is malformed. Also ``KeyError`` and ``TypeError``.
    """
    import numpy as np

    if not _DTYPE.fullmatch(tag["dtype"]):
        raise ValueError(f"numpy values of dtype {str(tag['dtype'])[:40]!r} are not read")
    data = base64.b64decode(tag["v"], validate=True)
    shape = tag["shape"]
    if shape is None:
        return _decode_scalar(tag["dtype"], data)
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape is not a list of sizes")
    dtype = np.dtype(tag["dtype"])
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("the bytes do not fill the shape")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _decode_scalar(code: str, data: bytes) -> Any:
    import numpy as np

    # Read as an array, text would lose its trailing zero characters.
    if code[1] == "S":
        return np.bytes_(data)
    if code[1] == "U":
        order = "be" if np.dtype(code).str[0] == ">" else "le"
        return np.str_(data.decode(f"utf-32-{order}", errors="surrogatepass"))
    (scalar,) = np.frombuffer(data, np.dtype(code))
    return scalar
