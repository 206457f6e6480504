"""Seeds of a training, one for each rank."""

from __future__ import annotations

import os
import random
import secrets

import torch

from ..errors import UsageError

__all__ = ["choose_seed", "make_deterministic", "reseed", "seed_everything"]

_LARGEST = 2**32 - 1


def choose_seed(seed: int | None) -> int:
    """Return the seed of rank 0: the one given, or a random one.

    Raises:
        UsageError: Not a whole number that fits NumPy's 32 bits.
    """
    if seed is None:
        return secrets.randbelow(2**31)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _LARGEST:
        raise UsageError(f"seed={seed!r} is not a whole number from 0 to {_LARGEST}.")
    return seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    import numpy as np

    seed %= _LARGEST + 1
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def reseed(seed: int, *, rank: int) -> None:
    """Give a rank beyond 0 a seed of its own, after what all ranks had to do alike."""
    if rank:
        seed_everything(seed)


def make_deterministic(*, is_wanted: bool) -> None:
    """Make torch choose kernels that give the same result every time, for the whole process."""
    if not is_wanted:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
