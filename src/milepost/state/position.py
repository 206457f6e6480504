"""Whether a position within an epoch, taken with one loader, means the same place in another.

A position is a number of batches. It leads to the same place only if batches are of the same size,
the data of the same length, and the order is made in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ranks.team import num_ranks
from .samplers import order_of

__all__ = ["is_torchdata", "measures", "misfit", "num_batches", "remarks"]

_UNITS = {
    "batch_size": "samples in a batch",
    "num_samples": "samples in the data set",
    "num_batches": "batches in an epoch",
}


def num_batches(loader: Any) -> int | None:
    """Return the batches of an epoch, or ``None`` if the loader cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_torchdata(loader: Any) -> bool:
    """Return whether a loader is torchdata's, which keeps the position and not all generators."""
    return any(cls.__module__.startswith("torchdata.") for cls in type(loader).__mro__)


def measures(loader: Any) -> dict[str, int | None]:
    """Return what a position in batches depends on; ``None`` where it cannot be told."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    try:
        num_samples = len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        num_samples = None
    return {
        "num_ranks": num_ranks(),
        "batch_size": size if type(size) is int else None,
        "num_samples": num_samples,
        "num_batches": num_batches(loader),
    }


def misfit(loader: Any, kind: str, state: Mapping[str, Any]) -> str | None:
    """Return why a stored position does not fit a loader, or ``None`` if it does.

    Args:
        loader: The loader, told which epoch the position is in.
        kind: Its kind: ``stateful``, ``indexed`` or ``replayed``.
        state: From ``ResumableLoader.state_dict``.
    """
    position, kind_then = state["position"], state["kind"]
    is_open = bool(position or state.get("is_open"))
    if type(position) is not int or (is_open and not isinstance(state["start"], Mapping)):
        return "The stored position of a loader is malformed."
    if not position:
        return None
    length = num_batches(loader)
    if kind_then == "dealt":
        how = str(state["start"].get("order")).partition(" with ")[2]
        return (
            f"The checkpoint is at sample {state.get('samples')} of an epoch that a "
            "ResumableSampler dealt to the ranks; this loader has none, and cannot go on there. "
            "Pass DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=..., "
            f"{how})) of milepost.train."
        )
    if kind_then != kind:
        return (
            f"The checkpoint is at batch {position} of an epoch of a loader of the kind "
            f"{kind_then!r}; this one is of the kind {kind!r}."
        )
    if length is not None and position > length:
        return (
            f"The checkpoint is at batch {position} of an epoch, but this loader has only "
            f"{length} batches."
        )
    is_torchdatas = kind == "stateful" and is_torchdata(loader)
    if kind != "stateful" or is_torchdatas:
        reason = _other_ranks(state) or _other_measure(loader, state) or _other_order(loader, state)
        if reason is not None:
            return reason
    workers = getattr(loader, "num_workers", 0)
    if is_torchdatas and state.get("num_workers", workers) != workers:
        return (
            f"The checkpoint is at batch {position} of an epoch of a StatefulDataLoader with "
            f"{state['num_workers']} workers, and its state fits no other number; this one has "
            f"{workers} workers."
        )
    return None


def remarks(loader: Any, kind: str, state: Mapping[str, Any]) -> list[str]:
    """Return what to know of going on from a stored position that fits, each in a sentence."""
    if state["position"] and kind == "stateful" and _other_ranks(state):
        remark = (
            "Another number of ranks was at work in this epoch, and the loader keeps its own "
            "position: whether each sample is used once is up to it."
        )
        return [remark]
    then, now = state.get("num_workers"), getattr(loader, "num_workers", 0)
    is_other = type(then) is int and bool(then) != bool(now)
    if not (state["position"] and kind == "indexed" and is_other):
        return []
    remark = (
        f"The epoch was begun with {then} loader workers and goes on with {now}: random numbers "
        "that the data set draws come from elsewhere now."
    )
    return [remark]


def _other_ranks(state: Mapping[str, Any]) -> str | None:
    stored, now = state.get("num_ranks"), num_ranks()
    if stored is None or stored == now:
        return None
    return (
        f"The checkpoint is at batch {state['position']} of an epoch that {stored} ranks shared, "
        f"and here are {now}. With a milepost.train.ResumableSampler an epoch goes on on any "
        "number of ranks."
    )


def _other_measure(loader: Any, state: Mapping[str, Any]) -> str | None:
    live = measures(loader)
    for name, unit in _UNITS.items():
        stored, now = state.get(name), live[name]
        if stored is not None and now is not None and stored != now:
            return (
                f"The checkpoint is at batch {state['position']} of an epoch with {stored} {unit}; "
                f"this loader has {now}."
            )
    return None


def _other_order(loader: Any, state: Mapping[str, Any]) -> str | None:
    stored, now = state["start"].get("order"), order_of(loader)
    if stored is None or now is None or stored == now:
        return None
    return (
        f"The checkpoint is at batch {state['position']} of an epoch whose order comes from "
        f"{stored}; that of this loader comes from {now}."
    )
