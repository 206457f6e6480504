"""Memory of a few blocks that is lent to a client, and used again once it has let go of it.

A client may hold what it was given until it has been sent, which may be long after it asked for the
next; then the memory must not be filled anew. Python knows of every view of a ``bytearray``, also
of those that native code holds, and refuses to change its length while there is one: so no client
has to say when it is done. Memory that is still held is left alone, and more is taken: as many
blocks as a client holds at a time, and one.
"""

from __future__ import annotations

__all__ = ["LentBlocks"]


class LentBlocks:
    """Blocks of memory, of one size. For one thread at a time.

    Args:
        num_bytes: The size.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._blocks: list[bytearray] = []

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return len(self._blocks)

    def copy(self, data: memoryview) -> memoryview:
        """Return a copy of ``data``, which is good as long as somebody holds a view of it.

        Args:
            data: The bytes; more than a block get memory that is not used again.
        """
        if len(data) > self._num_bytes:
            return memoryview(bytes(data))
        view = memoryview(self._take())[: len(data)]
        view[:] = data
        return view

    def _take(self) -> bytearray:
        for block in self._blocks:
            try:
                block.pop()
            except BufferError:
                continue  # somebody has a view of it
            block.append(0)
            return block
        self._blocks.append(bytearray(self._num_bytes))
        return self._blocks[-1]
