"""The random number generators of a process: Python, NumPy, torch on the CPU and accelerators.

The state is kept as numbers, text and tensors only, so that it can be read without running code.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import FormatError

__all__ = ["apply_rng", "capture_rng", "preserve_rng"]

RngState = Mapping[str, Any]


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator.

    Returns:
        ``python``: the tuple of ``random.getstate()``; ``numpy``: fields of the legacy generator;
        ``torch``: [num_bytes] uint8; ``accelerator``: one such tensor for each visible device.
    """
    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
        "accelerator": _accelerator_states(),
    }


def apply_rng(state: RngState) -> None:
    """Put every generator into a captured state.

    Accelerators are matched by index; those that the state does not know keep theirs.

    Raises:
        FormatError: The state is not one that :func:`capture_rng` made.
    """
    import numpy as np

    try:
        version, internal, gauss_next = state["python"]
        numpy_state = state["numpy"]
        keys = numpy_state["keys"].numpy().astype(np.uint32)
        random.setstate((version, tuple(internal), gauss_next))
        np.random.set_state(
            (
                numpy_state["kind"],
                keys,
                numpy_state["position"],
                numpy_state["has_gauss"],
                numpy_state["gauss"],
            )
        )
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"The stored state of the random generators is malformed: {error}."
        ) from error
    _apply_accelerators(state.get("accelerator", []))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Leave every generator as it was found, whatever the block draws."""
    state = capture_rng()
    try:
        yield
    finally:
        apply_rng(state)


def _accelerator() -> Any:
    """Return the torch module of the accelerator in use, or ``None``."""
    kind = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if kind is not None:
        return getattr(torch, kind.type, None)
    return sys.modules["torch.cuda"] if torch.cuda.is_available() else None


def _accelerator_states() -> list[Any]:
    module = _accelerator()
    if module is None or not module.is_available():
        return []
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


def _apply_accelerators(states: list[Any]) -> None:
    module = _accelerator()
    if module is None or not states or not module.is_available():
        return
    if hasattr(module, "set_rng_state") and hasattr(module, "device_count"):
        for index, state in enumerate(states[: module.device_count()]):
            module.set_rng_state(state, index)
    else:
        module.set_rng_state(states[0])
