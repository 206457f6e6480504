"""Write a checkpoint as a folder of torch.distributed.checkpoint (DCP), for programs that load one.

The whole state is in memory meanwhile. The folder gets its name when it is whole and durable.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import ExistsError, storage_error
from ...stores import posix
from ...stores.posix import expanded

__all__ = ["export_folder"]


def export_folder(state: Mapping[str, Any], target: str | os.PathLike[str]) -> Path:
    """Write a state as a folder that ``torch.distributed.checkpoint.load`` takes.

    Args:
        state: Values by item.
        target: The folder; it must not exist.

    Returns:
        The folder.

    Raises:
        ExistsError: The folder is there already.
    """
    path = expanded(target).absolute()
    if os.path.lexists(path):
        raise ExistsError(
            f"{path} is already there.",
            safe="It was not touched.",
            hint="Choose another name.",
            path=str(path),
        )
    temporary = path.parent / posix.temporary_name()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with warnings.catch_warnings():
                # That it is one process is not worth a word.
                warnings.filterwarnings("ignore", message="torch.distributed is")
                save(dict(state), checkpoint_id=temporary)
            posix.sync_folder(str(temporary))
            if not posix.rename_new(str(temporary), str(path)):
                temporary.rename(path)  # onto a folder that is not empty this fails
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)
        posix.sync_folder(str(path.parent))
    except OSError as error:
        raise storage_error(error, operation="write", path=str(path)) from error
    return path
