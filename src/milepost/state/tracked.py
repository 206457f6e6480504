"""What a run saves: named objects, captured and restored together.

Restoring has an order: models first, so that optimizers find the names of their parameters; then
optimizers; then schedulers and everything else. Nothing is changed before everything was checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..collecting import no_collecting
from ..errors import DuplicateNameError, UsageError
from ..progress.timer import Timer
from ..ranks.team import Team
from ..tensors.pack import Home, PackedItem, pack_item
from ..tensors.packing import Packing
from .holders import Holders, join_places
from .loader import ResumableLoader
from .model import ModelPart
from .names import ParameterNames
from .objects import FromLeader, GroupPart, ObjectPart, PerRank, Stateful, Value, ValuePart
from .optimizer import OptimizerPart
from .owned import Owned, owned_by
from .parts import Part
from .report import LoadReport, restoring
from .setup import apply_setup, capture_setup, members_of, setup_problems
from .sizes import Sizes, sum_sizes
from .source import StateSource, load_item, subtree
from .stage_part import StagePart
from .stages import Model, Stage, modules_of
from .walks import Walk, walk_of, walked_once
from .wrappers import unwrap

__all__ = ["RESERVED_ITEMS", "Tracked", "check_item_names"]

RESERVED_ITEMS = ("rng", "gradients", "setup")
"""Items that a run adds by itself."""

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


def check_item_names(names: Iterable[str]) -> None:
    """Refuse names that cannot be those of items.

    Raises:
        UsageError: Naming the first one.
    """
    for name in names:
        # No hyphen: the second part of an item is called item-frozen.
        if name in RESERVED_ITEMS or not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a tracked object.",
                hint="Use letters, digits and underscores, and none of rng, gradients, setup.",
            )


class Tracked:
    """The objects of a run by name.

    Args:
        strict: Whether a restore demands that both sides hold the same items.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self._objects: dict[str, Any] = {}
        self._parts: dict[str, Part] = {}
        self._packings: dict[str, Packing] = {}
        self._members: dict[str, list[tuple[str, int]]] = {}
        self._homes: dict[str, Home] = {}
        self._holders: dict[str, Holders] = {}
        self._names_now: list[ParameterNames] = []
        self._names: tuple[list[tuple[str, bool, Walk]], ParameterNames] | None = None
        self._rank = 0

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def refresh(self) -> bool:
        """Look at groups whose members were replaced, added or taken out since.

        Returns:
            Whether there are such; they are saved with the members that they have now.
        """
        changed = [
            name
            for name, target in self._objects.items()
            if _is_group(target) and self._members[name] != _members(target)
        ]
        for name in changed:
            target = self._objects[name]
            self._parts[name] = self._part(name, target)
            self._packings[name], self._members[name] = Packing(name), _members(target)
        return bool(changed)

    def add(self, name: str, target: Any) -> None:
        """Track an object.

        Args:
            name: Its name in every checkpoint.
            target: A module, an optimizer, anything with ``state_dict`` and ``load_state_dict``, a
                :class:`Value`, a :class:`Stage`, a pair of getter and setter, or a mapping of such.

        Raises:
            DuplicateNameError: The name is taken.
            UsageError: The object cannot be tracked, or the name is not usable.
        """
        check_item_names([name])
        if name in self._parts:
            raise DuplicateNameError(
                f"Two objects are tracked as {name!r}.",
                hint=f"Give the second one a name of its own: track({name}_2=...).",
                name=name,
            )
        home: Home = "leader" if isinstance(target, Timer | FromLeader) else "all"
        if isinstance(target, PerRank):
            home = "each"
        elif isinstance(target, ResumableLoader):
            home = target.home
        if isinstance(target, PerRank | FromLeader):
            target = target.target
        self._parts[name] = self._part(name, target)
        self._packings[name] = Packing(name)
        self._objects[name], self._homes[name] = target, home
        if _is_group(target):
            self._members[name] = _members(target)

    def parameter_names(self) -> ParameterNames:
        """Return the names of the parameters of all tracked models, as they are now."""
        models = _models(self._objects)
        walks = [
            (name, isinstance(model, Stage), walk_of(unwrap(module)))
            for name, model in models.items()
            for module in (model.modules if isinstance(model, Stage) else (model,))
        ]
        if self._names is None or walks != self._names[0] or any(w.is_flat for *_, w in walks):
            self._names = walks, ParameterNames(models)
        return self._names[1]

    def models(self) -> dict[str, nn.Module]:
        """Return the tracked modules by name, those inside groups and stages included."""
        return modules_of(_models(self._objects))

    def meet(self, team: Team, *, timeout_s: float, items: Collection[str] | None = None) -> None:
        """Tell the other ranks what this one holds of values that are spread over the ranks.

        Every rank must call it. Of some items it is called only where they are spread.

        Args:
            team: The ranks.
            timeout_s: How long to wait for the last of them.
            items: Of these items only.

        Raises:
            MismatchError: An item is spread over some ranks, and others have all of it.
            RankFailedError: A rank failed.
            DeadlineError: A rank did not come.
        """
        self._rank = team.rank
        names = self._parts if items is None else items
        if team.world_size == 1:
            return
        if items is not None and all(self._parts[name].spread() is None for name in items):
            return

        def mine() -> dict[str, Any]:
            shared = [name for name in names if self._homes[name] == "all"]
            places = {name: self._parts[name].spread() for name in shared}
            return {
                name: None if found is None else sorted(map(list, found))
                for name, found in places.items()
            }

        joined = team.gather("tell what it holds", mine, join_places, timeout_s=timeout_s)
        for name, pairs in joined.items():
            found = {tuple(place): tuple(ranks) for ranks, places in pairs for place in places}
            self._holders[name] = Holders(team.rank, found)
            if name in self._parts:
                self._parts[name].learn(self._holders[name].places)

    def optimizers(self) -> list[tuple[str, str, OptimizerPart]]:
        """Return ``(item, member or "", part)`` of every tracked optimizer."""
        found: list[tuple[str, str, OptimizerPart]] = []
        for name, part in self._parts.items():
            members = part.members if isinstance(part, GroupPart) else {"": part}
            found.extend((name, m, p) for m, p in members.items() if isinstance(p, OptimizerPart))
        return found

    def loaders(self) -> dict[str, ResumableLoader]:
        """Return the tracked loaders by name."""
        return {k: v for k, v in self._objects.items() if isinstance(v, ResumableLoader)}

    def small_parts(self) -> dict[str, Part]:
        """Return by name what is no model, optimizer, loader or timer: schedulers, values."""
        found: dict[str, Part] = {}
        for name, part in self._parts.items():
            members = part.members if isinstance(part, GroupPart) else {"": part}
            for member, one in members.items():
                is_known = isinstance(getattr(one, "target", None), ResumableLoader | Timer)
                if isinstance(one, ObjectPart | ValuePart) and not is_known:
                    found[f"{name}/{member}" if member else name] = one
        return found

    def sizes(self) -> Sizes:
        """Return about how large the state is, by the ranks that hold it; see ``sum_sizes``."""
        optimizers = [part.optimizer for _, _, part in self.optimizers()]
        return sum_sizes(_models(self._objects).values(), optimizers)

    def owned(self, *, with_embeddings: bool) -> Owned:
        """Return what the tracked optimizers own at this moment; see ``owned_by``."""
        optimizers = [part.optimizer for _, _, part in self.optimizers()]
        return owned_by(optimizers, self.models().values(), with_embeddings=with_embeddings)

    def stray_note(self) -> str:
        """Return a warning about parameters that are optimized and not saved, or ``""``."""
        names = self.parameter_names()
        strays = sum(
            names.of(parameter) is None
            for _, _, part in self.optimizers()
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        )
        if not strays:
            return ""
        return (
            f"{strays} parameters of tracked optimizers belong to no tracked model: their state is "
            "saved, and their values are not. Track the models that hold them."
        )

    def rank_states(self) -> dict[str, Any]:
        """Return what of loaders is a rank's own though their position is that of all ranks."""
        states = {name: loader.rank_state() for name, loader in self.loaders().items()}
        return {name: state for name, state in states.items() if state}

    def load_rank_states(self, states: Mapping[str, Any]) -> None:
        """Give loaders what this rank saved of them. Names that are not tracked are passed over."""
        for name, state in states.items():
            target = self._objects.get(name)
            if isinstance(target, ResumableLoader):
                target.load_rank_state(state)

    def capture(self) -> list[PackedItem]:
        """Take the state of every object, without copying tensors.

        Raises:
            UnsupportedStateError: A value that cannot be stored; the message leads to it.
        """
        with no_collecting(), walked_once():
            return self._capture()

    def _capture(self) -> list[PackedItem]:
        self.refresh()
        self._names_now[:] = [self.parameter_names()]  # the same for all that asks for them
        try:
            items = [self._pack(name, part) for name, part in self._parts.items()]
        finally:
            self._names_now.clear()
        has_stages = any(isinstance(one, Stage) for one in _models(self._objects).values())
        setup = pack_item(
            "setup", capture_setup(self._objects), home="spread" if has_stages else "all"
        )
        return [*items, setup]

    @contextmanager
    def _names_for(self, part: Part) -> Iterator[None]:
        """Find the names of parameters once for an optimizer, which asks for them several times.

        Of several optimizers each has them anew: what is restored between may change a model.
        """
        if isinstance(part, OptimizerPart):
            self._names_now[:] = [self.parameter_names()]
        try:
            yield
        finally:
            self._names_now.clear()

    def _pack(self, name: str, part: Part) -> PackedItem:
        is_spread = part.spread() is not None and self._homes[name] == "all"
        return self._packings[name].pack(
            part.capture(),
            frozen=part.frozen(),
            leaders=part.leaders(),
            home="spread" if is_spread else self._homes[name],
            holders=self._holders.get(name, Holders(self._rank, {})) if is_spread else None,
        )

    def restore(
        self,
        source: StateSource,
        *,
        items: Collection[str] | None = None,
        expected: Collection[str] = (),
        strict: bool | None = None,
        on_begin: Callable[[LoadReport], None] | None = None,
    ) -> LoadReport:
        """Restore every tracked object.

        Args:
            source: Where the state is stored.
            items: Restore only these.
            expected: Items that may be tracked later; not counted as unexpected.
            strict: Overrides the strictness given at construction.
            on_begin: Called with what fits, right before the first object is changed.

        Raises:
            MismatchError: What is stored does not fit; nothing was changed then.
        """
        strict = self.strict if strict is None else strict
        with no_collecting(), walked_once():
            report, present = self._compare(source, items=items, expected=expected)
        if strict:
            report.require_exact()
        if on_begin is not None:
            on_begin(report)
        for name in sorted(present, key=self._order):
            part = self._parts[name]
            with restoring(source.name, name), self._names_for(part):
                part.apply(source, name, report)
        if "setup" in source.trees:
            with restoring(source.name, "setup"):
                stored = load_item(source, "setup")
                report.notes += apply_setup(stored, {name: self._objects[name] for name in present})
        return report

    def check(self, source: StateSource, *, expected: Collection[str] = ()) -> None:
        """Compare a stored state with the tracked objects, and change nothing.

        Raises:
            MismatchError: It does not fit, and must.
        """
        report, _ = self._compare(source, items=None, expected=expected)
        if self.strict:
            report.require_exact()

    def _compare(
        self, source: StateSource, *, items: Collection[str] | None, expected: Collection[str]
    ) -> tuple[LoadReport, list[str]]:
        """Return what fits and what does not, and the items that are on both sides."""
        report = LoadReport(source.name)
        names = [name for name in self._parts if items is None or name in items]
        present = [name for name in names if name in source.trees]
        report.missing.extend(name for name in names if name not in source.trees)
        if items is None:
            known = {*self._parts, *RESERVED_ITEMS, *expected}
            report.unexpected.extend(name for name in source.trees if name not in known)
        for name in present:
            part = self._parts[name]
            with restoring(source.name, name), self._names_for(part):
                part.check(source, name, report)
        if "setup" in source.trees:
            with restoring(source.name, "setup"):
                stored = load_item(source, "setup")
                live = {name: self._objects[name] for name in present}
                report.problems += setup_problems(stored, live)
        return report, present

    def reapply_optimizer_options(self, source: StateSource) -> None:
        """Restore learning rates once more, after a scheduler was built on a restored optimizer."""
        for item, member, part in self.optimizers():
            if item in source.trees:
                if member:
                    part.reapply_options(subtree(source, item, member), f"{item}/{member}")
                else:
                    part.reapply_options(source, item)

    def _order(self, name: str) -> int:
        target = self._objects[name]
        members = list(target.values()) if isinstance(target, Mapping) else [target]
        if any(isinstance(member, nn.Module | Stage) for member in members):
            return 0
        return 1 if any(isinstance(member, Optimizer) for member in members) else 2

    def _part(self, name: str, target: Any) -> Part:
        if isinstance(target, nn.Module):
            return ModelPart(unwrap(target), strict=self.strict)
        if isinstance(target, Stage):
            return StagePart(target, strict=self.strict)
        if isinstance(target, Optimizer):
            # Not self: a cycle would keep loader workers alive for a while.
            objects, now = self._objects, self._names_now
            return OptimizerPart(
                target, names=lambda: now[0] if now else ParameterNames(_models(objects))
            )
        if isinstance(target, Value):
            return ValuePart(target)
        if isinstance(target, Stateful):
            return ObjectPart(target)
        is_pair = isinstance(target, tuple) and len(target) == 2 and all(map(callable, target))
        if is_pair and not any(isinstance(one, nn.Module | Stateful) for one in target):
            return ValuePart(Value(*target))
        if isinstance(target, Mapping) and all(isinstance(key, str) for key in target):
            nested = [key for key, member in target.items() if _is_group(member)]
            if nested:
                raise UsageError(
                    f"{name}[{nested[0]!r}] is a group within a group.",
                    hint=f"Track it by itself: {nested[0]}=...",
                    name=name,
                )
            return GroupPart({key: self._part(key, member) for key, member in target.items()})
        raise UsageError(
            f"The object given as {name!r} ({type(target).__qualname__}) cannot be tracked.",
            hint="Give it state_dict and load_state_dict, or pass milepost.Value(getter, setter).",
            name=name,
        )


def _is_group(target: Any) -> bool:
    return isinstance(target, Mapping) and not isinstance(target, Stateful)


def _members(group: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return what tells whether a group has other members; their parts keep all of them alive."""
    return [(key, id(member)) for key, member in group.items()]


def _models(objects: Mapping[str, Any]) -> dict[str, Model]:
    """Return the models among tracked objects by name, those inside groups included."""
    members = members_of(objects)
    return {label: target for label, target in members if isinstance(target, nn.Module | Stage)}
