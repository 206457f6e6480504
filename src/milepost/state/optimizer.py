"""Optimizers: state keyed by the name of the parameter, never by its position.

Torch matches optimizer state by position, so that two parameters of one shape silently swap their
moments when the order of groups changes, and it converts moments to the dtype of the parameter.
Both are undone here: state goes to the parameter of the same name, in the dtype it was saved in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from .flattened import owners_in_groups
from .names import ParameterNames, tied_names
from .parts import Alike, Place
from .plain_optimizer import PlainOptimizer
from .report import LoadReport
from .slots import Slot
from .source import StateSource, load_tree
from .zero import holder_of, share_options

__all__ = ["OptimizerPart"]

_OWN = ("params", "param_names")
"""What a group has of its own, and takes from no checkpoint."""


F = TypeVar("F", bound=Callable[..., Any])


def _with_owners(method: F) -> F:
    """Have a method see the flat parameters in the groups of an optimizer that hides them."""

    @wraps(method)
    def wrapped(self: OptimizerPart, *args: Any) -> Any:
        with owners_in_groups(self.optimizer):
            return method(self, *args)

    return cast("F", wrapped)


class OptimizerPart(Alike):
    """An optimizer whose parameters have names.

    Args:
        optimizer: The live optimizer.
        names: Returns the names of the parameters of all tracked models, as they are now.
    """

    def __init__(self, optimizer: Optimizer, *, names: Callable[[], ParameterNames]) -> None:
        self.optimizer = optimizer
        self._get_names = names
        self._plain = PlainOptimizer(optimizer)
        self._known: set[str] = set()
        self._tied: Mapping[str, Sequence[str]] = {}

    @_with_owners
    def capture(self) -> dict[str, Any]:
        """Return the state by parameter name.

        Returns:
            ``state``: name -> what the optimizer keeps for it on this rank; ``param_groups``:
            options with the names of the parameters; ``other``: state that belongs to no parameter.
        """
        holder = holder_of(self.optimizer)
        names = self._get_names()
        is_alike = holder is self.optimizer and names.are_alike
        plain = self._plain.state(names) if is_alike else None
        if plain is not None:
            return plain
        state = holder.state_dict()
        if is_alike:
            return self._by_name(state)
        slots = _by_index(self._held_slots(()))
        captured = dict(state)
        if holder is self.optimizer:
            groups = [[slots[index] for index in g["params"]] for g in state["param_groups"]]
            options = state["param_groups"]
        else:
            groups, options = self._slots(()), self.optimizer.param_groups
        captured["param_groups"] = [
            {**group, "params": [name for slot in members for name in slot.names]}
            for group, members in zip(options, groups, strict=True)
        ]
        if self.spread() is not None:
            for group in captured["param_groups"]:
                group.pop("param_names", None)  # those of this rank, in another form
        known = {k: v for k, v in state["state"].items() if type(k) is int and k in slots}
        captured["state"] = {
            name: part for index, v in known.items() for name, part in slots[index].split(v).items()
        }
        captured["other"] = {k: v for k, v in state["state"].items() if k not in known}
        return captured

    def _by_name(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict by parameter name, where no parameter was flattened."""
        first = self._get_names().first
        names: dict[int, str] = {}
        for g, group in enumerate(self.optimizer.param_groups):
            for i, number in enumerate(map(id, group["params"])):
                names[number] = first.get(number) or f"group{g}/{i}"
        by_index = list(names.values())
        known = {k: v for k, v in state["state"].items() if type(k) is int and k < len(by_index)}
        captured = dict(state)
        captured["param_groups"] = [
            {**group, "params": [by_index[index] for index in group["params"]]}
            for group in state["param_groups"]
        ]
        captured["state"] = {by_index[index]: value for index, value in known.items()}
        captured["other"] = {k: v for k, v in state["state"].items() if k not in known}
        return captured

    @_with_owners
    def spread(self) -> Collection[Place] | None:
        """Return the parameters whose state this rank has, if other ranks have other state."""
        names = self._get_names()
        is_same = holder_of(self.optimizer) is self.optimizer
        if is_same and names.are_alike:
            return None
        slots = [slot for group in self._held_slots(()) for slot in group]
        if is_same and not any(slot.shares or names.is_staged(slot.parameter) for slot in slots):
            return None
        return {("state", name) for slot in slots for name in slot.held}

    def learn(self, places: Collection[Place]) -> None:
        """Take note of the parameters of the optimizers of all ranks."""
        self._known = {place[1] for place in places}

    @_with_owners
    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Compare the groups and the parameters in them."""
        tree = source.trees[item]
        if not isinstance(tree, Mapping) or not {"state", "param_groups"} <= set(tree):
            report.problems.append(f"{item} is not the state of an optimizer.")
            return
        self._tied = tied_names(source.trees)
        stored = [list(group["params"]) for group in tree["param_groups"]]
        group_of = {name: index for index, names in enumerate(stored) for name in names}
        live = self._names_by_group(group_of)
        for names in live:
            homes = sorted({group_of[name] for name in names if name in group_of})
            options = [_options(tree["param_groups"][home]) for home in homes]
            if any(one != options[0] for one in options):
                report.problems.append(
                    f"{item}: the parameters {', '.join(names[:4])} form one group now and were in "
                    f"{len(homes)} groups."
                )
        live_names = {name for names in live for name in names}
        report.missing.extend(f"{item}: {name}" for name in sorted(live_names - set(group_of)))
        known = live_names | self._known | self._get_names().all()
        strange = {n for n in group_of if known.isdisjoint((n, *self._tied.get(n, ())))}
        report.unexpected.extend(f"{item}: {name}" for name in sorted(strange))

    @_with_owners
    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Restore state and group options, each to the parameter of the same name."""
        self._tied = tied_names(source.trees)
        holder = holder_of(self.optimizer)
        tree, infos = source.trees[item], source.tensors(item)
        slots = [slot for group in self._held_slots(_names(tree)) for slot in group]
        names = {name for slot in slots for name in slot.held}
        wanted = {name: value for name, value in tree["state"].items() if name in names}
        into = {key: one for slot in slots for key, one in slot.into(wanted, infos).items()}
        stored = load_tree(source, item, {**tree, "state": wanted}, into=into)
        if type(holder).load_state_dict is Optimizer.load_state_dict:
            self._restore_options(stored)
            share_options(self.optimizer)
            self._restore_state(stored)
        else:
            self._load_by_position(stored)
            if holder is not self.optimizer:
                self._restore_options(stored)
        report.loaded.extend(
            f"{item}: {name}" for names in self._names_by_group(_names(stored)) for name in names
        )

    @_with_owners
    def reapply_options(self, source: StateSource, item: str) -> None:
        """Restore the options of the groups once more, after a scheduler was built upon them."""
        tree = source.trees[item]
        self._restore_options(load_tree(source, item, {"param_groups": tree["param_groups"]}))
        share_options(self.optimizer)

    def _slots(self, stored: Collection[str]) -> list[list[Slot]]:
        """Return what the optimizer has, by group, under the names it was stored under if it was.

        A parameter of no tracked model is called after its place.
        """
        names = self._get_names()
        return [
            [
                Slot(
                    parameter,
                    names.all_among(parameter, stored, self._tied) or (f"group{g}/{i}",),
                    names.shares(parameter),
                )
                for i, parameter in enumerate(group["params"])
            ]
            for g, group in enumerate(self.optimizer.param_groups)
        ]

    def _held_slots(self, stored: Collection[str]) -> list[list[Slot]]:
        """Return that whose state is on this rank, by group."""
        slots = self._slots(stored)
        holder = holder_of(self.optimizer)
        if holder is self.optimizer:
            return slots
        slot_of = {id(slot.parameter): slot for group in slots for slot in group}
        return [[slot_of[id(p)] for p in group["params"]] for group in holder.param_groups]

    def _names_by_group(self, stored: Collection[str] = ()) -> list[list[str]]:
        """Return the names of all parameters of each group."""
        return [[name for slot in group for name in slot.names] for group in self._slots(stored)]

    def _restore_options(self, stored: Mapping[str, Any]) -> None:
        group_of = {name: group for group in stored["param_groups"] for name in group["params"]}
        live = self._names_by_group(group_of)
        for names, group in zip(live, self.optimizer.param_groups, strict=True):
            home = next((group_of[name] for name in names if name in group_of), None)
            if home is None:
                continue
            own = {key: group[key] for key in _OWN if key in group}
            group.clear()
            group.update({**own, **_options(home)})

    def _restore_state(self, stored: Mapping[str, Any]) -> None:
        holder = holder_of(self.optimizer)
        state: defaultdict[Any, Any] = defaultdict(dict)
        groups = self._held_slots(_names(stored))
        for slots, group in zip(groups, holder.param_groups, strict=True):
            for slot in slots:
                value = slot.join(stored["state"])
                if value is not None:
                    state[slot.parameter] = _place(value, slot.parameter, group)
        state.update(stored.get("other", {}))
        extra = {
            key: value
            for key, value in stored.items()
            if key not in ("state", "param_groups", "other")
        }
        holder.__setstate__({**extra, "state": state, "param_groups": holder.param_groups})

    def _load_by_position(self, stored: Mapping[str, Any]) -> None:
        """Hand a state dict in torch's own form to an optimizer that loads it in its own way."""
        held = self._held_slots(_names(stored))
        slots = _by_index(held)
        index_of = {id(slot.parameter): index for index, slot in slots.items()}
        group_of = {name: group for group in stored["param_groups"] for name in group["params"]}
        groups = []
        for members, live in zip(held, holder_of(self.optimizer).param_groups, strict=True):
            names = [name for slot in members for name in slot.names]
            # A group of which nothing was stored, or of which this rank holds nothing, stays.
            home = next((group_of[name] for name in names if name in group_of), live)
            groups.append({**home, "params": [index_of[id(slot.parameter)] for slot in members]})
        joined = {index: slot.join(stored["state"]) for index, slot in slots.items()}
        state: dict[Any, Any] = {i: value for i, value in joined.items() if value is not None}
        state.update(stored.get("other", {}))
        rest = {k: v for k, v in stored.items() if k not in ("state", "param_groups", "other")}
        holder_of(self.optimizer).load_state_dict({**rest, "state": state, "param_groups": groups})


def _by_index(groups: Sequence[Sequence[Slot]]) -> dict[int, Slot]:
    """Return the slot behind each number in torch's own state dict."""
    seen = {id(slot.parameter): slot for group in groups for slot in group}
    return dict(enumerate(seen.values()))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, live or stored."""
    return {key: value for key, value in group.items() if key not in _OWN}


def _names(stored: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters that a stored state knows."""
    return {name for group in stored["param_groups"] for name in group["params"]}


def _place(value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Move state to the device of its parameter, keeping its dtype.

    A ``step`` on the CPU stays there unless the kernel in use wants it beside the parameter.
    """
    wants_step = bool(group.get("capturable") or group.get("fused"))

    def move(key: str | None, item: Any) -> Any:
        if isinstance(item, Tensor):
            if key == "step" and not wants_step:
                return item
            return item.to(parameter.device)
        if isinstance(item, dict):
            return {k: move(k, v) for k, v in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(move(None, v) for v in item)
        return item

    with torch.no_grad():
        return move(None, value)
