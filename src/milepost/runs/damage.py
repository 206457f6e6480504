"""What an error says: that bytes are damaged, or that they could not be fetched.

Readers fall back to an earlier checkpoint when one is damaged. On a disk of this machine a read
that fails is damage: a bad sector stays bad. A bucket that is down, or a network that fails, says
nothing of what is stored, and going on from an earlier checkpoint then would lose the newest one
without a word.
"""

from __future__ import annotations

from ..errors import CheckpointError, StorageError
from ..stores.base import Store

__all__ = ["raise_unreachable"]


def raise_unreachable(store: Store, error: CheckpointError) -> None:
    """Raise an error of a read if it says nothing of what the store holds."""
    if isinstance(error, StorageError) and not store.traits.is_local:
        raise error
