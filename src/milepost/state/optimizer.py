"""Optimizers: state keyed by the name of the parameter, never by its position.

Torch matches optimizer state by position, so that two parameters of one shape silently swap their
moments when the order of groups changes, and it converts moments to the dtype of the parameter.
Both are undone here: state goes to the parameter of the same name, in the dtype it was saved in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensors.boxes import is_sharded
from ..tensors.unpack import leaf_tag
from .names import ParameterNames, tied_names
from .parts import Alike, Place
from .report import LoadReport
from .source import StateSource, load_tree, new_like
from .zero import holder_of, share_options

__all__ = ["OptimizerPart"]

_OWN = ("params", "param_names")
"""What a group has of its own, and takes from no checkpoint."""


class OptimizerPart(Alike):
    """An optimizer whose parameters have names.

    Args:
        optimizer: The live optimizer.
        names: Returns the names of the parameters of all tracked models, as they are now.
    """

    def __init__(self, optimizer: Optimizer, *, names: Callable[[], ParameterNames]) -> None:
        self.optimizer = optimizer
        self._get_names = names
        self._known: set[str] = set()
        self._tied: Mapping[str, Sequence[str]] = {}

    def capture(self) -> dict[str, Any]:
        """Return the state by parameter name.

        Returns:
            ``state``: name -> what the optimizer keeps for it on this rank; ``param_groups``:
            options with the names of the parameters; ``other``: state that belongs to no parameter.
        """
        holder = holder_of(self.optimizer)
        state = holder.state_dict()
        by_index = self._names_by_index(holder)
        captured = dict(state)
        if holder is self.optimizer:
            named = [[by_index[index] for index in g["params"]] for g in state["param_groups"]]
            options = state["param_groups"]
        else:
            named, options = self._names_by_group(), self.optimizer.param_groups
        captured["param_groups"] = [
            {**group, "params": names} for group, names in zip(options, named, strict=True)
        ]
        if self.spread() is not None:
            for group in captured["param_groups"]:
                group.pop("param_names", None)  # those of this rank, in another form
        known = {k: v for k, v in state["state"].items() if type(k) is int and k in by_index}
        captured["state"] = {by_index[index]: value for index, value in known.items()}
        captured["other"] = {k: v for k, v in state["state"].items() if k not in known}
        return captured

    def spread(self) -> Collection[Place] | None:
        """Return the parameters whose state this rank has, if other ranks have other state."""
        holder, names = holder_of(self.optimizer), self._get_names()
        is_staged = any(names.is_staged(p) for g in holder.param_groups for p in g["params"])
        if holder is self.optimizer and not is_staged:
            return None
        return {("state", name) for names in self._held_names(()) for name in names}

    def learn(self, places: Collection[Place]) -> None:
        """Take note of the parameters of the optimizers of all ranks."""
        self._known = {place[1] for place in places}

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

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Restore state and group options, each to the parameter of the same name."""
        self._tied = tied_names(source.trees)
        holder = holder_of(self.optimizer)
        tree = source.trees[item]
        names = {n for g in self._held_names(_names(tree)) for n in g}
        wanted = {name: value for name, value in tree["state"].items() if name in names}
        stored = load_tree(
            source, item, {**tree, "state": wanted}, into=self._sharded(source, item)
        )
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

    def _sharded(self, source: StateSource, item: str) -> dict[str, Tensor]:
        """Return tensors to read state into that is sharded as its parameter is, by key."""
        tree, infos = source.trees[item], source.tensors(item)
        found: dict[str, Tensor] = {}
        live = self._names_by_group(_names(tree))
        for names, group in zip(live, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                state = tree["state"].get(name) if is_sharded(parameter) else None
                for tag in state.values() if isinstance(state, Mapping) else ():
                    key = leaf_tag(tag) if _is_plain(tag) else ""
                    if key in infos and infos[key].shape == tuple(parameter.shape):
                        found[key] = new_like(parameter.detach(), infos[key])
        return found

    def reapply_options(self, source: StateSource, item: str) -> None:
        """Restore the options of the groups once more, after a scheduler was built upon them."""
        tree = source.trees[item]
        self._restore_options(load_tree(source, item, {"param_groups": tree["param_groups"]}))
        share_options(self.optimizer)

    def _names_by_group(self, stored: Collection[str] = ()) -> list[list[str]]:
        """Return the names of the parameters of each group, as they were stored if they were."""
        names = self._get_names()
        return [
            [
                names.among(p, stored, self._tied) or f"group{g}/{i}"
                for i, p in enumerate(group["params"])
            ]
            for g, group in enumerate(self.optimizer.param_groups)
        ]

    def _held_names(self, stored: Collection[str]) -> list[list[str]]:
        """Return the names of those whose state is on this rank, by group."""
        groups = self.optimizer.param_groups
        name_of = {
            id(parameter): name
            for names, group in zip(self._names_by_group(stored), groups, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        }
        holder = holder_of(self.optimizer)
        return [[name_of[id(p)] for p in group["params"]] for group in holder.param_groups]

    def _names_by_index(self, holder: Optimizer, stored: Collection[str] = ()) -> dict[int, str]:
        """Return the name behind each number in torch's own state dict."""
        result: dict[int, str] = {}
        seen: dict[int, int] = {}
        for names, group in zip(self._held_names(stored), holder.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                index = seen.setdefault(id(parameter), len(seen))
                result[index] = name
        return result

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
        for names, group in zip(self._held_names(_names(stored)), holder.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                if name in stored["state"]:
                    state[parameter] = _place(stored["state"][name], parameter, group)
        state.update(stored.get("other", {}))
        extra = {
            key: value
            for key, value in stored.items()
            if key not in ("state", "param_groups", "other")
        }
        holder.__setstate__({**extra, "state": state, "param_groups": holder.param_groups})

    def _load_by_position(self, stored: Mapping[str, Any]) -> None:
        """Hand a state dict in torch's own form to an optimizer that loads it in its own way."""
        holder = holder_of(self.optimizer)
        by_index = self._names_by_index(holder, _names(stored))
        index_of = {name: index for index, name in by_index.items()}
        group_of = {name: group for group in stored["param_groups"] for name in group["params"]}
        groups = []
        for names in self._held_names(group_of):
            home = next(group_of[name] for name in names if name in group_of)
            groups.append({**home, "params": [index_of[name] for name in names]})
        state = {index_of[n]: value for n, value in stored["state"].items() if n in index_of}
        state.update(stored.get("other", {}))
        rest = {k: v for k, v in stored.items() if k not in ("state", "param_groups", "other")}
        holder.load_state_dict({**rest, "state": state, "param_groups": groups})


def _is_plain(tag: Any) -> bool:
    return isinstance(tag, Mapping) and tag.get("$") == "tensor" and "dtype" not in tag


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
