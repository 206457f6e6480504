"""Milepost as the storage of torch.distributed.checkpoint (DCP).

    dcp.save(state, checkpoint_id="ep3", storage_writer=StorageWriter("runs/a"))
    dcp.load(state, storage_reader=StorageReader("runs/a/ep3"))

What DCP saves this way is a checkpoint like any other, and what was saved in any way loads through
DCP. No pickle is written, and none that was stored is read. The only package that imports
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
