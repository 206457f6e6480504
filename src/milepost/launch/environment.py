"""The environment of a worker: what torchrun sets, and what Milepost adds."""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Mapping
from pathlib import Path

from ..errors import UsageError

__all__ = ["check_outside", "environment_of", "free_port"]

_HOST = "127.0.0.1"
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
        UsageError: It is.
    """
    if "MILEPOST_TELL_FD" in os.environ:
        raise UsageError(
            "A worker cannot launch workers.",
            hint="Workers import the file again: put the call of launch under if __name__ == "
            '"__main__".',
        )


def free_port(used: Container[int]) -> int:
    """Return a port that nobody listens on, and that no earlier attempt has used.

    Args:
        used: Ports of earlier attempts. Their connections may linger.
    """
    for _ in range(_TRIES):
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in used:
            return port
    return port


def environment_of(
    rank: int,
    *,
    num_workers: int,
    attempt: int,
    max_failures: int,
    port: int,
    launch_folder: Path,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of one worker.

    Args:
        rank: Its rank.
        num_workers: How many there are.
        attempt: Number of the attempt, from 1.
        max_failures: As in ``FailureConfig``.
        port: Where rank 0 listens for the others.
        launch_folder: Folder of the launch.
        base: The environment of the launcher.
    """
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "NODE_RANK": 0,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": num_workers,
        "LOCAL_WORLD_SIZE": num_workers,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": num_workers,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": max_failures,
        "TORCHELASTIC_RUN_ID": f"{launch_folder.parent.parent.name}-{launch_folder.name}",
        "MILEPOST_ATTEMPT": attempt,
        "MILEPOST_LAUNCH_DIR": launch_folder,
        "MILEPOST_LAUNCHER_PID": os.getpid(),
    }
    environment = {name: value for name, value in base.items() if name not in _FOREIGN}
    environment |= {name: str(value) for name, value in own.items()}
    if num_workers > 1:
        # As torchrun: each worker would otherwise use every core.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
