"""States of torch's generators, looked at before a generator gets them.

Torch takes a state whose position lies beyond its numbers, and then reads memory that is not its
own. States may come from strangers, so each is checked first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError

__all__ = ["NUM_WORDS", "byte_tensors", "checked_state", "set_generator"]

NUM_WORDS = 624
"""Numbers in a Mersenne twister; Python, NumPy and torch on the CPU all use it."""


def set_generator(generator: torch.Generator, state: Any) -> None:
    """Put a generator of torch into a stored state.

    Raises:
        FormatError: It is no state of such a generator; nothing was changed.
    """
    try:
        generator.set_state(checked_state(generator, state))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"The stored state of a random generator is malformed: {error}."
        ) from error


def byte_tensors(stored: Iterable[Any]) -> list[Tensor]:
    """Return stored values if each is a row of bytes.

    Raises:
        ValueError: One is not.
    """
    states = list(stored)
    for state in states:
        if not isinstance(state, Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
            raise ValueError("the state of a generator of torch is no row of bytes")
    return states


def checked_state(generator: torch.Generator, stored: Any) -> Tensor:
    """Return a stored state if the generator may be given it: [num_bytes], uint8, on the CPU.

    Raises:
        ValueError: It may not.
        RuntimeError: Torch refuses it.
    """
    (state,) = byte_tensors([stored])
    state = state.cpu()
    if generator.device.type != "cpu":
        return state  # seed and offset, which any numbers may be
    trial = torch.Generator()
    if len(state) != len(trial.get_state()):
        raise ValueError("the state of a generator of torch has another length")
    trial.set_state(state)  # torch looks whether it is one of its own
    # It does not look whether the words that are left (int32) lie behind the next one (uint64).
    _, left, _, following = struct.unpack_from("=qiiQ", state.numpy().tobytes())
    if left + following > NUM_WORDS + 1:
        raise ValueError("the position of torch's generator is beyond its end")
    return state
