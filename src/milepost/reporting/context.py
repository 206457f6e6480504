"""Who this worker is, and where its run is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

__all__ = ["TrainContext", "ranks_here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """What a training function may want to know about its place.

    Attributes:
        world_size: The number of workers.
        world_rank: The number of this one, from 0 on.
        local_rank: Its number on its machine.
        local_world_size: The number of workers on its machine.
        node_rank: The number of its machine.
        run_path: Where the run is; empty if nothing is reported here.
    """

    world_size: int
    world_rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_path: str

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.world_size

    def get_world_rank(self) -> int:
        """Return the number of this worker, from 0 on."""
        return self.world_rank

    def get_local_rank(self) -> int:
        """Return the number of this worker on its machine."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this machine."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Return the number of this machine."""
        return self.node_rank

    def get_experiment_name(self) -> str:
        """Return the name of the run."""
        return self.run_path.rstrip("/").rpartition("/")[2]

    def get_run_path(self) -> str:
        """Return where the run is: a folder, or the address of another kind of place."""
        return self.run_path


def ranks_here(run_path: str) -> TrainContext:
    """Return the context of this process, from its process group or its environment."""
    world_rank, world_size = _group() or (_number("RANK", 0), _number("WORLD_SIZE", 1))
    return TrainContext(
        world_size=world_size,
        world_rank=world_rank,
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        node_rank=_number("GROUP_RANK", _number("NODE_RANK", 0)),
        run_path=run_path,
    )


def _group() -> tuple[int, int] | None:
    """Return rank and size of the process group, if torch is loaded and there is one."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name, "") or default)
