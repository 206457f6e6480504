"""What people use today, each called as its own documentation says, in its best setting on a CPU.

Every save here ends durable: the library's files are synced afterwards, and their folder, where it
does not do that itself. Those that copy the state first and write it later are in
:data:`IN_BACKGROUND`; what a loop must do before it changes the state is their ``before_step``.

A peer that is not installed is left out, and named by :func:`missing`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

__all__ = ["IN_BACKGROUND", "LOADS", "SAVES", "InBackground", "clear", "missing", "timed_loads"]

State = dict[str, Tensor]

_OPTIONAL = ("torchsnapshot", "torch_checkpointing", "runai_model_streamer")


def missing() -> list[str]:
    """Return the packages that are measured when they are installed, and are not."""
    return [name for name in _OPTIONAL if not _is_there(name)]


def clear(folder: Path) -> None:
    """Remove what the peers have written."""
    for path in folder.iterdir():
        if path.name.startswith("peer"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync every file below a folder, and every folder."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)
    _sync(folder.parent)


# Saves that return when everything is durable.


def _torch_save(state: State, folder: Path) -> None:
    with (folder / "peer.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _safetensors_save(state: State, folder: Path) -> None:
    save_file(state, folder / "peer.st")
    _sync(folder / "peer.st")
    _sync(folder)


def _dcp_save(state: State, folder: Path) -> None:
    path = folder / "peer-dcp"
    dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)
    _sync(path)
    _sync(folder)


def _torchsnapshot_save(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    path = folder / "peer-torchsnapshot"
    Snapshot.take(str(path), {"state": StateDict(**state)})
    sync_tree(path)


SAVES: Mapping[str, Callable[[State, Path], None]] = {
    "torch.save": _torch_save,
    "safetensors": _safetensors_save,
    "dcp.save": _dcp_save,
    **({"torchsnapshot": _torchsnapshot_save} if _is_there("torchsnapshot") else {}),
}


# Loads into tensors that are there.


def _torch_load(target: State, folder: Path) -> None:
    loaded = torch.load(folder / "peer.pt", weights_only=True)
    for key, tensor in target.items():
        tensor.copy_(loaded[key])


def _safetensors_load(target: State, folder: Path) -> None:
    with safe_open(folder / "peer.st", "pt") as file:
        for key, tensor in target.items():
            tensor.copy_(file.get_tensor(key))


def _dcp_load(target: State, folder: Path) -> None:
    dcp.load(target, storage_reader=FileSystemReader(folder / "peer-dcp"), no_dist=True)


def _torchsnapshot_load(target: State, folder: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(folder / "peer-torchsnapshot")).restore({"state": StateDict(**target)})


def _runai_load(target: State, folder: Path) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "peer.st"))
        for name, tensor in streamer.get_tensors():
            target[name].copy_(tensor)


LOADS: Mapping[str, Callable[[State, Path], None]] = {
    "torch.load": _torch_load,
    "safetensors": _safetensors_load,
    "dcp.load": _dcp_load,
    **({"torchsnapshot": _torchsnapshot_load} if _is_there("torchsnapshot") else {}),
    **({"runai streamer": _runai_load} if _is_there("runai_model_streamer") else {}),
}


def timed_loads(target: State, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the loads of what :data:`SAVES` wrote to a folder."""
    return {name: partial(load, target, folder) for name, load in LOADS.items()}


# Saves that return when the loop may go on.


class InBackground(Protocol):
    """A way to save while training goes on."""

    def save(self, state: State, folder: Path) -> None:
        """Begin to save; return when the loop may go on, up to its next :meth:`step`."""

    def step(self) -> AbstractContextManager[Any]:
        """Return what the loop must change its state in."""

    def wait(self) -> None:
        """Wait until what was saved is durable."""

    def close(self) -> None:
        """End what was started."""


class _DcpAsync:
    """``async_save``, in a thread or in a process with a stager of its own for each save."""

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self._folder = Path()
        self._staged: Any = None
        self._written: Any = None
        self._stager: DefaultStager | None = None
        self._has_group = not dist.is_initialized()
        if self._has_group:
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def save(self, state: State, folder: Path) -> None:
        self._folder = folder / "peer-dcp-async"
        how: dict[str, Any] = {}
        if self._in_process:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            if self._stager is None:
                self._stager = DefaultStager(options)
            how = {
                "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
                "async_stager": self._stager,
            }
        writer = FileSystemWriter(self._folder, sync_files=True)
        answer = dcp.async_save(state, storage_writer=writer, **how)
        if self._in_process:
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._written = answer

    def step(self) -> AbstractContextManager[Any]:
        if self._staged is not None:
            self._staged.result()
            self._staged = None
        return nullcontext()

    def wait(self) -> None:
        self.step()
        if self._written is not None:
            self._written.result()
            self._written = None
            _sync(self._folder)
            _sync(self._folder.parent)

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()
        if self._has_group:
            dist.destroy_process_group()


class _TorchSnapshotAsync:
    """``Snapshot.async_take``, which returns when everything is in memory of its own."""

    def __init__(self) -> None:
        self._pending: Any = None
        self._path = Path()

    def save(self, state: State, folder: Path) -> None:
        from torchsnapshot import Snapshot, StateDict

        self._path = folder / "peer-torchsnapshot-async"
        self._pending = Snapshot.async_take(str(self._path), {"state": StateDict(**state)})

    def step(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            sync_tree(self._path)

    def close(self) -> None:
        self.wait()


class _TorchCheckpointing:
    """``CheckpointManager`` without pinned memory and direct I/O, its settings for a CPU."""

    def __init__(self) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._written: Any = None
        self._path = Path()

    def save(self, state: State, folder: Path) -> None:
        self._path = folder / "peer-torch-checkpointing"
        self._written = self._manager.save(str(self._path), {"state": state})

    def step(self) -> AbstractContextManager[Any]:
        return self._manager.lock()

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None
            sync_tree(self._path)

    def close(self) -> None:
        self.wait()
        self._manager.close()


IN_BACKGROUND: Mapping[str, Callable[[], InBackground]] = {
    "dcp.async_save": partial(_DcpAsync, in_process=False),
    "dcp.async_save, process": partial(_DcpAsync, in_process=True),
    **({"torchsnapshot.async_take": _TorchSnapshotAsync} if _is_there("torchsnapshot") else {}),
    **({"torch-checkpointing": _TorchCheckpointing} if _is_there("torch_checkpointing") else {}),
}
