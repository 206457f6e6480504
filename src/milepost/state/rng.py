"""The random number generators of a process: Python, NumPy, torch on the CPU and accelerators.

The state is kept as numbers, text and tensors only, so that it can be read without running code.
Whether it is a state at all is checked here and before anything is changed: the generators trust
it, and some read beyond the end of their memory if a position in it is too large.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..tensors.generators import NUM_WORDS, byte_tensors, checked_state

__all__ = ["apply_rng", "capture_rng", "derived_rng", "preserve_rng", "rng_of_rank"]

RngState = Mapping[str, Any]

_log = logging.getLogger("milepost")


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator.

    Returns:
        ``python``: the tuple of ``random.getstate()``; ``numpy``: fields of the legacy generator;
        ``torch``: [num_bytes] uint8; ``accelerator``: one such tensor for each visible device.
    """
    import numpy as np

    return {
        "python": random.getstate(),
        "numpy": _numpy_fields(np.random.get_state(legacy=True)),
        "torch": torch.get_rng_state(),
        "accelerator": _accelerator_states(),
    }


def apply_rng(state: RngState) -> None:
    """Put every generator into a captured state.

    Accelerators are matched by index; those that the state does not know keep theirs.

    Raises:
        FormatError: The state is not one that :func:`capture_rng` made; nothing was changed.
    """
    import numpy as np

    try:
        python_state = _python_state(state["python"])
        numpy_state = _numpy_state(state["numpy"])
        torch_state = checked_state(torch.default_generator, state["torch"])
        accelerators = byte_tensors(state.get("accelerator", []))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise FormatError(
            f"The stored state of the random generators is malformed: {error}."
        ) from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    _apply_accelerators(accelerators)


def derived_rng(state: RngState, rank: int) -> dict[str, Any]:
    """Return a state for a rank that has none of its own, made from that of another rank.

    Args:
        state: The state of the other rank.
        rank: The rank that needs one: each gets another.
    """
    import numpy as np

    digest = hashlib.blake2b(rank.to_bytes(8, "little"), digest_size=32)
    digest.update(state["torch"].numpy().tobytes())
    seed = digest.digest()
    words = np.frombuffer(seed, dtype="<u4")
    return {
        "python": random.Random(seed).getstate(),  # noqa: S311 - no secret
        "numpy": _numpy_fields(np.random.RandomState(words).get_state(legacy=True)),
        "torch": torch.Generator().manual_seed(int.from_bytes(seed[:8], "little")).get_state(),
        "accelerator": _derived_accelerators(seed),
    }


def rng_of_rank(
    states: Sequence[RngState], rank: int, *, shown: int | None
) -> tuple[RngState | None, bool]:
    """Return the state of one rank from what a source holds, and whether it is its own.

    A rank that the source does not know gets one that is made from that of another rank.

    Args:
        states: The states of all ranks, or of one; empty: there is none.
        rank: The rank.
        shown: Whose state it is where it is that of one; ``None``: rank 0's.
    """
    if not states:
        return None, False
    own = dict(enumerate(states)) if len(states) > 1 else {shown or 0: states[0]}
    return (own[rank], True) if rank in own else (derived_rng(states[0], rank), False)


def _derived_accelerators(seed: bytes) -> list[Tensor]:
    module = _accelerator()
    if module is None or not module.is_available():
        return []
    number = int.from_bytes(seed[:8], "little")
    kind = module.__name__.rpartition(".")[2]
    return [torch.Generator(device=kind).manual_seed(number).get_state()]


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Leave every generator as it was found, whatever the block draws."""
    state = capture_rng()
    try:
        yield
    finally:
        apply_rng(state)


def _python_state(stored: Any) -> tuple[Any, ...]:
    version, internal, gauss_next = stored
    words = tuple(internal)
    if type(version) is not int or version != 3 or len(words) != NUM_WORDS + 1:
        raise ValueError("it is no state of Python's generator")
    if not all(type(word) is int and 0 <= word < 2**32 for word in words):
        raise ValueError("Python's generator has a word that is not one of 32 bits")
    if words[-1] > NUM_WORDS or type(gauss_next) not in (float, type(None)):
        raise ValueError("the position of Python's generator is beyond its end")
    return version, words, gauss_next


def _numpy_fields(state: Any) -> dict[str, Any]:
    import numpy as np

    kind, keys, position, has_gauss, gauss = state
    return {
        "kind": str(kind),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _numpy_state(stored: Any) -> tuple[Any, ...]:
    import numpy as np

    kind, keys = stored["kind"], stored["keys"]
    position, has_gauss, gauss = stored["position"], stored["has_gauss"], stored["gauss"]
    if kind != "MT19937" or not isinstance(keys, Tensor) or keys.shape != (NUM_WORDS,):
        raise ValueError("it is no state of NumPy's generator")
    if keys.dtype is not torch.int64 or int(keys.min()) < 0 or int(keys.max()) >= 2**32:
        raise ValueError("NumPy's generator has a word that is not one of 32 bits")
    if type(position) is not int or not 0 <= position <= NUM_WORDS:
        raise ValueError("the position of NumPy's generator is beyond its end")
    if type(has_gauss) is not int or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError("NumPy's generator has a next normal number that is none")
    return kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss


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


def _apply_accelerators(states: list[Tensor]) -> None:
    module = _accelerator()
    if module is None or not states or not module.is_available():
        return
    if not (hasattr(module, "set_rng_state") and hasattr(module, "device_count")):
        module.set_rng_state(states[0])
        return
    for index, state in enumerate(states[: module.device_count()]):
        if len(state) != len(module.get_rng_state(index)):
            _log.warning(
                "The stored state of the generator of accelerator %s is that of another kind of "
                "device; the generator keeps the state that it has.",
                index,
            )
            continue
        try:
            module.set_rng_state(state, index)
        except RuntimeError as error:
            raise FormatError(
                f"The stored state of the generator of accelerator {index} is malformed: {error}."
            ) from error
