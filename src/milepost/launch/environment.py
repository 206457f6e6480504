"""The environment of a worker: what torchrun sets, and what Milepost adds."""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DeadlineError, UsageError
from ..processes.functions import refuse_while_imported
from .engine import Plan

__all__ = ["LOOPBACK", "HeldPort", "Spot", "check_outside", "environment_of"]

LOOPBACK = "127.0.0.1"
_TRIES = 100
# Of a torchrun around the launcher: workers would look for its store in place of their own.
_FOREIGN = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)


def check_outside() -> None:
    """Require that this process is no worker of a launch.

    Raises:
        UsageError: It is; or it only imports a script that does this.
    """
    if "MILEPOST_TELL_FD" in os.environ:
        raise UsageError(
            "A worker cannot launch workers.",
            hint="Workers import the file again: put the call of launch under if __name__ == "
            '"__main__".',
        )
    refuse_while_imported("launched workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where one worker stands among the others.

    Attributes:
        rank: Its rank.
        local_rank: Its rank among those of its machine.
        node_rank: Number of its machine.
        num_workers: How many workers there are.
        num_local: How many there are on its machine.
        num_nodes: How many machines there are.
    """

    rank: int
    local_rank: int
    node_rank: int
    num_workers: int
    num_local: int
    num_nodes: int


class HeldPort:
    """A port that rank 0 will listen on, kept free for it until then.

    It is bound and never listened on. As long as that lasts the kernel gives it to nobody who asks
    for any port, and only to those who ask for this one with SO_REUSEADDR, as every server does.

    Args:
        used: Ports of earlier attempts. Their connections may linger.
        host: Address of the interface; empty for all.
    """

    def __init__(self, used: Container[int] = (), *, host: str = LOOPBACK) -> None:
        for _ in range(_TRIES):
            self._socket = socket.socket()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
            self.number = int(self._socket.getsockname()[1])
            if self.number not in used:
                return
            self._socket.close()
        raise DeadlineError(
            f"No port came free in {_TRIES} tries that no earlier attempt has used.",
            hint="Look at what holds the ports of this machine with ss -tan.",
        )

    def close(self) -> None:
        """Let it go."""
        self._socket.close()


def environment_of(
    spot: Spot,
    *,
    plan: Plan,
    address: tuple[str, int],
    launch_folder: Path,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of one worker.

    Args:
        spot: Where it stands.
        plan: The attempt.
        address: Where rank 0 listens for the others.
        launch_folder: Folder of the launch on this machine.
        base: The environment of the process that starts it.
    """
    host, port = address
    own = {
        "RANK": spot.rank,
        "LOCAL_RANK": spot.local_rank,
        "NODE_RANK": spot.node_rank,
        "GROUP_RANK": spot.node_rank,
        "ROLE_RANK": spot.rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": spot.num_workers,
        "LOCAL_WORLD_SIZE": spot.num_local,
        "GROUP_WORLD_SIZE": spot.num_nodes,
        "ROLE_WORLD_SIZE": spot.num_workers,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": plan.number - 1,
        "TORCHELASTIC_MAX_RESTARTS": plan.max_failures,
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "MILEPOST_ATTEMPT": plan.number,
        "MILEPOST_LAUNCH_DIR": launch_folder,
        "MILEPOST_LAUNCHER_PID": os.getpid(),
    }
    environment = {name: value for name, value in base.items() if name not in _FOREIGN}
    environment |= plan.variables
    environment |= {name: str(value) for name, value in own.items()}
    if spot.num_local > 1:
        # As torchrun: each worker would otherwise use every core.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
