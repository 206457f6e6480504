"""Whether ranks that should have the same bytes have them.

Of a tensor that several ranks hold one of them writes its own. If the others had something else,
the checkpoint would be a mixture that no rank ever was in, and nothing would show it. So each rank
takes a checksum of what it shares with others at the moment of the save, and the leader compares.

By default the checksum is one of samples: all of a tensor of up to 4 KiB, and of a larger one 64
runs of 64 bytes, spread evenly, elsewhere in each save. That costs microseconds a tensor, and finds
every difference that is everywhere, as after one step with another gradient. It may miss one in a
few elements of a large tensor, until a save looks there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import MismatchError
from ..format.digest import crc32c
from ..ranks.solo import RankCheck, Team
from ..tensors.memory import host_bytes
from ..tensors.pack import Leaf, PackedItem

__all__ = ["Marks", "differing_groups", "mark", "raise_differing"]

_RUNS = 64
_RUN_BYTES = 64
_SHOWN = 8


@dataclass(slots=True)
class Marks:
    """Checksums of what this rank shares with others.

    Attributes:
        groups: By the ranks that share it, as text: the checksum of each tensor by its name.
    """

    groups: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def sums(self) -> dict[str, int]:
        """Return one checksum for each group of ranks."""
        return {
            ranks: crc32c(b"".join(n.to_bytes(4, "little") for _, n in sorted(found.items())))
            for ranks, found in self.groups.items()
        }


def mark(
    items: Sequence[PackedItem], *, rank: int, world_size: int, name: str, how: RankCheck
) -> Marks:
    """Take checksums of what this rank should have the same bytes of as others.

    Args:
        items: The state, with live tensors.
        rank: This rank.
        world_size: The number of ranks.
        name: The name of the checkpoint, the same on all ranks; says where samples are taken.
        how: ``sample``, ``full`` for all bytes, ``none`` for nothing.
    """
    if how == "none":
        return Marks()
    chosen = [
        (f"{item.name}/{leaf.part_key}", tensor, shared)
        for item in items
        for leaf, tensor in zip(item.leaves, item.tensors, strict=True)
        if (shared := _shared(item, leaf, rank, world_size))
    ]
    with torch.no_grad():
        taken = [
            _all_bytes(tensor) if how == "full" else _sample(tensor, f"{name}/{label}")
            for label, tensor, _ in chosen
        ]
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for (label, _, ranks), data in zip(chosen, _on_host(taken), strict=True):
        groups[ranks][label] = crc32c(host_bytes(data).data)
    return Marks(dict(groups))


def differing_groups(told: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the groups of ranks that do not all say the same.

    Args:
        told: By rank: the checksum for each group that it belongs to.
    """
    keys = dict.fromkeys(key for one in told for key in one)
    return [key for key in keys if len({told[rank].get(key) for rank in _ranks(key)}) > 1]


def raise_differing(team: Team, marks: Marks, groups: Sequence[str], *, timeout_s: float) -> None:
    """Find out which tensors differ.

    Args:
        team: The ranks.
        marks: What this rank has.
        groups: From :func:`differing_groups`.
        timeout_s: How long to wait for the last rank.

    Raises:
        MismatchError: Always, naming the tensors; the same on every rank.
    """

    def mine() -> dict[str, dict[str, int]]:
        return {key: marks.groups[key] for key in groups if key in marks.groups}

    def compare(told: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, list[str]]:
        differing: set[str] = set()
        missing: set[str] = set()
        for key in groups:
            among = [told[rank].get(key, {}) for rank in _ranks(key)]
            for label in {label for one in among for label in one}:
                values = {one.get(label) for one in among}
                if len(values) > 1:
                    (missing if None in values else differing).add(label)
        return {"differing": sorted(differing), "missing": sorted(missing)}

    found = team.gather("compare its tensors", mine, compare, timeout_s=timeout_s)
    differing, missing = found["differing"], found["missing"]
    said = []
    if differing:
        said.append(f"have different values of {_some(differing)}")
    if missing:
        said.append(f"do not all have {_some(missing)}")
    raise MismatchError(
        f"The ranks {', and '.join(said)}, which should be the same on all that hold it.",
        safe="Nothing was committed; earlier checkpoints are intact.",
        hint="Find out where they part, as after a step without the others' gradients. What is "
        "meant to differ is declared: milepost.PerRank(object).",
        names=[*differing, *missing],
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shared(item: PackedItem, leaf: Leaf, rank: int, world_size: int) -> str:
    """Return the ranks that share a tensor with this one, as text; nothing if none do."""
    if item.home not in ("all", "spread") or leaf.is_leaders or not leaf.num_bytes:
        return ""
    ranks = tuple(range(world_size)) if leaf.replicas is None else leaf.replicas
    if len(ranks) < 2 or rank not in ranks:
        return ""
    is_row = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if is_row else ",".join(map(str, ranks))


def _ranks(key: str) -> Sequence[int]:
    first, dash, last = key.partition("-")
    return range(int(first), int(last) + 1) if dash else [int(rank) for rank in key.split(",")]


def _all_bytes(value: Tensor) -> Tensor:
    # Not view(-1): a single value may keep a stride that it does not need.
    return value.contiguous().as_strided((value.numel(),), (1,)).view(torch.uint8)


def _sample(value: Tensor, label: str) -> Tensor:
    """Return some bytes of a tensor, the same places in all that have its shape and strides."""
    num_bytes = value.numel() * value.itemsize
    if num_bytes <= _RUNS * _RUN_BYTES:
        return _all_bytes(value)
    if not value.is_contiguous():
        value = value.contiguous() if value.dim() < 2 else _dense_order(value)
    step = num_bytes // _RUN_BYTES // _RUNS * _RUN_BYTES
    places = step // _RUN_BYTES
    start = crc32c(label.encode()) % places * _RUN_BYTES
    size = value.itemsize
    runs = value.as_strided(
        (_RUNS, _RUN_BYTES // size), (step // size, 1), value.storage_offset() + start // size
    )
    return runs.reshape(-1).view(torch.uint8)


def _dense_order(value: Tensor) -> Tensor:
    """Return a tensor with its dimensions in the order of its memory, copied if that has gaps."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    return value.permute(order).contiguous()


def _on_host(taken: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of bytes on the host; from a device all come in one transfer."""
    found = list(taken)
    for device in {one.device for one in taken if one.device.type != "cpu"}:
        there = [index for index, one in enumerate(taken) if one.device == device]
        sizes = [taken[index].numel() for index in there]
        host = torch.cat([taken[index] for index in there]).cpu()
        for index, one in zip(there, torch.split(host, sizes), strict=True):
            found[index] = one
    return found
