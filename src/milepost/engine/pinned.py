"""Copies from CUDA devices: into memory that CUDA knows, beside what the training computes.

    the training's stream     step ---------->  next batch ...
                                 |
    a stream of ours             waits for it   copies  ->  the save goes on

Into memory that is registered (*pinned*) a device copies by itself, at the speed of the bus, and
several copies follow each other without a wait. The copies wait for what the training has given its
device to do so far, and the save waits for the copies, not for anything that is given to the device
beside them.

Memory is taken back from CUDA before it is let go. Where there is no CUDA tensor, nothing in here
is called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..tensors.pack import PackedItem

__all__ = ["cuda_devices", "register", "side_streams", "unregister"]

_log = logging.getLogger("milepost")

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process


def cuda_devices(items: Iterable[PackedItem]) -> list[torch.device]:
    """Return the CUDA devices that something of a state lies on."""
    devices = {tensor.device for item in items for tensor in item.tensors}
    return [one for one in devices if one.type == "cuda"]


def register(address: int, num_bytes: int) -> bool:
    """Have CUDA know memory of the host; return whether it does.

    Args:
        address: Where the memory begins; page-aligned.
        num_bytes: How much. It stays where it is until :func:`unregister`, and none of its pages is
            given back before.
    """
    try:
        code = int(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        reason = f"CUDA error {code}"
        if code:
            _forget_error()
    except (RuntimeError, AttributeError) as error:
        code, reason = -1, str(error)
    if code:
        _log.warning(
            "The memory of saves could not be pinned (%s): copies from the device take longer.",
            reason,
        )
    return code == 0


def unregister(address: int) -> None:
    """Have CUDA forget memory that it knows, before it is let go."""
    try:
        code = int(_cudart().cudaHostUnregister(address))
        if code:
            _forget_error()
    except RuntimeError as error:  # a device that has failed takes nothing back
        _log.info("Pinned memory was not taken back: %s", error)
        return
    if code:
        _log.info("Pinned memory was not taken back: CUDA error %d.", code)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Have CUDA forget its last error, or the next kernel of the training would be blamed for it.

    It is told to whoever asks first, and then forgotten. What starts a kernel asks.
    """
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        _log.debug("Told once: %s", error)


@contextmanager
def side_streams(devices: Iterable[torch.device]) -> Iterator[None]:
    """Copy in streams of our own, after all that was given to the present ones.

    When the block ends, by an error too, everything that was copied in it has arrived.

    Args:
        devices: CUDA devices; none of them: do nothing.
    """
    streams = []
    with ExitStack() as stack:
        for device in devices:
            producer = torch.cuda.current_stream(device)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(producer)
            streams.append(stream)
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        try:
            yield
        finally:
            for stream in streams:
                stream.synchronize()
