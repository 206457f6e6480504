"""Saves of torch.distributed.checkpoint (DCP) that end in a checkpoint of a run.

DCP plans and gathers as ever:

    DCP                                   here
    rank 0 has all plans                  an attempt that failed before is removed; a folder is
                                          claimed, in a session that the first save opens
    each rank writes its plan             parts, and the table of what is in them, durable
    rank 0 has all results                trees, then the manifest: the commit

A rank that fails before the last step ends the save on all ranks with DCP's own exception, and
nothing was committed. Values that are no tensors become trees in the index.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.futures import Future

from ...checkpoint import Checkpoint
from ...convert.dcp_trees import Path, Place, Tree, build_tree, place_all
from ...engine.loose import LooseBox, write_boxes, write_index
from ...errors import MismatchError, RankFailedError, UsageError
from ...format.layout import ATTEMPT, check_name
from ...format.manifest import FileEntry
from ...publisher import Publisher
from ...runs.erase import read_write_id
from ...runs.folders import file_key
from ...runs.keep import KeepPolicy
from ...stores.base import Store
from ...stores.url import is_address, open_store, trimmed
from ...tensors.dtypes import CODES, dtype_name
from .planned import box_of, digests_of, paths_of, tensors_of, value_of

__all__ = ["StorageWriter"]

Folder = str | os.PathLike[str]
_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What the coordinator tells a rank: it travels with the plan.

    Attributes:
        folder: The folder that was claimed.
        write_id: Identity of the claim.
        rank: This rank.
        ranks: How many ranks write tables; ``None`` if there are none.
        items: Every item of the state.
        places: Where this rank's entries stand.
    """

    folder: str
    write_id: str
    rank: int
    ranks: int | None
    items: tuple[str, ...]
    places: Mapping[str, Place]


@dataclasses.dataclass(frozen=True, slots=True)
class _Receipt:
    """What a rank tells the coordinator: it travels with the results.

    Attributes:
        rank: The rank.
        write_id: Identity of the claim that it wrote for.
        files: Its files, as JSON.
        values: The trees of its values that are no tensors, by name.
        digests: A checksum of every such value that it has, also where another rank writes it.
    """

    rank: int
    write_id: str
    files: tuple[Any, ...]
    values: Mapping[str, Any]
    digests: Mapping[str, int]


@dataclasses.dataclass(slots=True)
class _State:
    """What the coordinator knows of the state that is being saved.

    Attributes:
        places: Where every entry stands.
        paths: Where every item stood in the state.
        dtypes: The dtype of each tensor by name.
        num_ranks: How many ranks write.
        ranks: How many of them write tables; ``None`` if none.
        write_id: Identity of the claim.
        folder: The folder.
    """

    places: Mapping[str, Place]
    paths: Mapping[str, Sequence[str]]
    dtypes: Mapping[str, torch.dtype]
    num_ranks: int
    ranks: int | None
    write_id: str
    folder: str


class StorageWriter(storage.StorageWriter):
    """Writes what ``torch.distributed.checkpoint`` saves as checkpoints of a run.

    Use one writer for all saves of a process. The name of a checkpoint is the ``checkpoint_id`` of
    the save: a name, or the path of a run and a name.

    Args:
        place: Folder of the run. May be left out if every ``checkpoint_id`` is a path.
        name: Name for saves without a ``checkpoint_id``. One that is taken gets a suffix.
        resumed_from: Name of the checkpoint that the training went on from; by default it is taken
            to be the newest. Checkpoints after it do not count any more.
        keep: Retention, applied after a commit. Empty keeps everything.
        allow_differing: Whether values that are no tensors may differ between ranks that have them
            under one name. DCP takes those of one rank then, and says nothing.
    """

    def __init__(
        self,
        place: Folder | None = None,
        *,
        name: str | None = None,
        resumed_from: str | None = None,
        keep: Sequence[KeepPolicy] = (),
        allow_differing: bool = False,
    ) -> None:
        self._allow_differing = allow_differing
        self._store = None if place is None else open_store(place)
        self._name = None if name is None else check_name(name)
        self._options: dict[str, Any] = {"origin": resumed_from, "keep": tuple(keep)}
        self._publisher: Publisher | None = None
        self._state: _State | None = None
        self._folder: str | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the newest save; it is committed once the save has returned."""
        if self._store is None or self._folder is None:
            return None
        return Checkpoint(self._store, self._folder)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """Take the name of the next checkpoint. Called by DCP."""
        if checkpoint_id is None:
            return
        text = os.fspath(checkpoint_id)
        text = trimmed(text) if is_address(text) else text.rstrip("/")
        place, _, name = text.rpartition("/")
        if is_address(text) and not is_address(place):
            raise UsageError(
                f"{text} names a bucket, and no checkpoint in a run.",
                safe="Nothing was written.",
                hint=f"Write {text}/run/name.",
            )
        check_name(name)
        if place:
            store = open_store(place)
            if self._store is None:
                self._store = store
            elif self._store.url != store.url:
                raise UsageError(
                    f"checkpoint_id leads to {store.url}, and the writer belongs to the run at "
                    f"{self._store.url}.",
                    safe="Nothing was written.",
                    hint="Give the name alone, or a writer to each run.",
                )
        self._name = name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        """Return whether this can be the name of a checkpoint, or the path of one."""
        return bool(os.fspath(checkpoint_id).strip("/"))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """Check how DCP is about to save. Called by DCP."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False makes a checkpoint of every rank, which fit no other number "
                "of ranks.",
                safe="Nothing was written.",
                hint="Leave it out.",
            )
        if self._store is None or self._name is None:
            raise UsageError(
                "There is no run to write to, or no name for the checkpoint.",
                safe="Nothing was written.",
                hint='Use StorageWriter("runs/a") and dcp.save(..., checkpoint_id="ep3").',
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan. Called by DCP."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim a folder, and tell every rank what it is called there. Called by DCP, on rank 0."""
        # Versions of torch that have no such plans do not say so either.
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise _no_plan_caching()
        assert self._store is not None
        assert self._name is not None
        tensors, boxes = tensors_of(plans)
        places, paths = place_all(paths_of(plans), tensors=frozenset(tensors))
        is_pieced = any(len(found) != 1 for found in boxes.values())
        ranks = len(plans) if len(plans) > 1 or is_pieced else None
        if self._publisher is None:
            self._publisher = Publisher(self._store, **self._options)
        held = self._publisher.claim(self._name)
        self._state = _State(places, paths, tensors, len(plans), ranks, held.write_id, held.folder)
        items = tuple(dict.fromkeys(place.item for place in places.values()))
        return [
            dataclasses.replace(
                plan,
                storage_data=_Task(
                    held.folder,
                    held.write_id,
                    rank,
                    ranks,
                    items,
                    {item.index.fqn: places[item.index.fqn] for item in plan.items},
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Write what this rank has to write, durably. Called by DCP."""
        task = plan.storage_data
        if getattr(planner, "_enable_plan_caching", False) or not isinstance(task, _Task):
            raise _no_plan_caching()
        assert self._store is not None
        _check_same_place(self._store, task)
        self._folder = task.folder
        items: dict[str, list[LooseBox]] = {item: [] for item in task.items}
        values: dict[str, Any] = {}
        results: list[storage.WriteResult] = []
        for item in plan.items:
            place = task.places[item.index.fqn]
            if item.type is WriteItemType.BYTE_IO:
                values[item.index.fqn], boxes = value_of(planner, item, place)
            else:
                found = box_of(planner, item, place)
                # Of a tensor that is not empty, an empty piece says nothing.
                is_void = found.box.is_empty and 0 not in found.whole_shape
                boxes = [] if is_void else [found]
            items[place.item] += boxes
            size = sum(box.num_bytes for box in boxes)
            results.append(storage.WriteResult(item.index, size, None))
        rank = None if task.ranks is None else task.rank
        files = write_boxes(self._store, task.folder, items, rank=rank)
        # Of one rank there is nothing to compare with.
        is_compared = task.ranks is not None and task.ranks > 1 and not self._allow_differing
        digests = digests_of(planner) if is_compared else {}
        receipt = _Receipt(
            task.rank, task.write_id, tuple(entry.to_json() for entry in files), values, digests
        )
        results.append(storage.WriteResult(MetadataIndex(""), 0, receipt))
        future: Future[list[storage.WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Write the trees and commit. Called by DCP, on rank 0, when every rank has written."""
        del metadata  # torch's own; ours is in the tables
        state, publisher = self._state, self._publisher
        assert state is not None
        assert publisher is not None
        try:
            receipts = _receipts_of(results, state)
            _check_alike(receipts)
            entries = [
                FileEntry.from_json(one, where=f"rank {receipt.rank}")
                for receipt in receipts
                for one in receipt.files
            ]
            values = {name: one for receipt in receipts for name, one in receipt.values.items()}
            trees = _trees_of(state, values)
            files = {
                item: [e.path for e in entries if e.path == f"{item}.safetensors"] for item in trees
            }
            index = write_index(
                publisher.store,
                state.folder,
                trees,
                files=files,
                paths=state.paths,
                ranks=state.ranks,
            )
            publisher.commit(items=list(trees), files=[*entries, index], world_size=state.num_ranks)
        except BaseException:
            publisher.give_up()
            raise


def _no_plan_caching() -> UsageError:
    return UsageError(
        "The planner uses the plans of an earlier save again, and every checkpoint has a folder of "
        "its own.",
        safe="Nothing was committed.",
        hint="Use DefaultSavePlanner(enable_plan_caching=False).",
    )


def _check_same_place(store: Store, task: _Task) -> None:
    """Make sure that this rank sees the folder that the coordinator has claimed."""
    key = file_key(task.folder, ATTEMPT)
    try:
        write_id = read_write_id(store, key)
    except FileNotFoundError:
        write_id = None
    if write_id != task.write_id:
        raise UsageError(
            f"{store.url} is not the same place on every rank: this one does not see {key}, which "
            "rank 0 has just written there.",
            safe="Nothing was committed.",
            hint="Use a folder that all machines share.",
            path=store.url,
        )


def _receipts_of(results: Sequence[Sequence[storage.WriteResult]], state: _State) -> list[_Receipt]:
    found = [
        one.storage_data
        for results_of_rank in results
        for one in results_of_rank
        if isinstance(one.storage_data, _Receipt)
    ]
    ranks = sorted(one.rank for one in found if one.write_id == state.write_id)
    if ranks != list(range(state.num_ranks)):
        raise RankFailedError(
            f"Of {state.num_ranks} ranks only {ranks} have written for this checkpoint.",
            safe="Nothing was committed.",
        )
    return found


def _check_alike(receipts: Sequence[_Receipt]) -> None:
    """Make sure that values of one name are the same on all ranks that have them."""
    seen: dict[str, set[int]] = defaultdict(set)
    for receipt in receipts:
        for name, digest in receipt.digests.items():
            seen[name].add(digest)
    differing = sorted(name for name, digests in seen.items() if len(digests) > 1)
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise MismatchError(
            f"The ranks have different values of {', '.join(differing[:_SHOWN])}{more}.",
            safe="Nothing was committed; earlier checkpoints are intact.",
            hint="Give each rank a key of its own, or use StorageWriter(..., "
            "allow_differing=True), which stores those of one rank.",
        )


def _trees_of(state: _State, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of every item."""
    leaves: dict[str, dict[Path, Tree]] = defaultdict(dict)
    for name, place in state.places.items():
        if name in state.dtypes:
            tag: dict[str, Any] = {"$": "tensor", "key": place.key}
            if state.dtypes[name] not in CODES:
                tag["dtype"] = dtype_name(state.dtypes[name])
            leaves[place.item][place.path] = Tree(tag)
        else:
            leaves[place.item][place.path] = Tree(values[name])
    return {item: build_tree(found) for item, found in leaves.items()}
