"""Other tracked things: objects with a state, plain values, and named groups of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from .loader import ResumableLoader
from .parts import Alike, Part, Place
from .report import LoadReport
from .source import StateSource, load_item, subtree

__all__ = ["FromLeader", "GroupPart", "ObjectPart", "PerRank", "Stateful", "Value", "ValuePart"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that hands out its state and takes it back."""

    def state_dict(self) -> Any:
        """Return the state as containers, numbers and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from a state."""


class Value:
    """A plain value to be saved and restored, reached through two functions.

    Args:
        get: Returns the value.
        set: Takes it back.

    Examples:
        >>> best = {"loss": 1.0}
        >>> value = Value(lambda: best["loss"], lambda loss: best.update(loss=loss))
        >>> value.get()
        1.0
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:  # noqa: A002
        self.get = get
        self.set = set


class PerRank:
    """Says that an object is a rank's own: each rank saves it, and each gets its own back.

    Args:
        target: Anything that can be tracked.
    """

    def __init__(self, target: Any) -> None:
        self.target = target


class FromLeader:
    """Says that an object is the leader's: rank 0 saves it, and every rank gets that back.

    Args:
        target: Anything that can be tracked. It may differ from rank to rank.
    """

    def __init__(self, target: Any) -> None:
        self.target = target


class ObjectPart(Alike):
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, target: Stateful) -> None:
        self.target = target

    def capture(self) -> Any:
        """Return its state."""
        return self.target.state_dict()

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Look at the position of a loader; leave other checks to the object itself."""
        if isinstance(self.target, ResumableLoader):
            stored = load_item(source, item)
            reason = self.target.misfit(stored)
            if reason is None:
                report.notes += self.target.remarks(stored)
            else:
                report.problems.append(reason)
                report.is_position_alien = True

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Give it the stored state."""
        self.target.load_state_dict(load_item(source, item))
        report.loaded.append(item)


class ValuePart(Alike):
    """A :class:`Value`."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def capture(self) -> Any:
        """Return the value."""
        return self.value.get()

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Leave the check to the setter."""

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Set the stored value."""
        self.value.set(load_item(source, item))
        report.loaded.append(item)


class GroupPart:
    """Named members that form one item, such as all callbacks.

    Args:
        members: Parts by name.
    """

    def __init__(self, members: Mapping[str, Part]) -> None:
        self.members = dict(members)

    def capture(self) -> dict[str, Any]:
        """Return the state of each member by name."""
        return {name: member.capture() for name, member in self.members.items()}

    def frozen(self) -> Collection[str]:
        """Return the frozen keys of all members."""
        return {f"{name}/{key}" for name, part in self.members.items() for key in part.frozen()}

    def leaders(self) -> Collection[str]:
        """Return the keys of all members of which the leader's are saved."""
        return {f"{name}/{key}" for name, part in self.members.items() for key in part.leaders()}

    def spread(self) -> Collection[Place] | None:
        """Return what this rank has of all members, if any of them is spread."""
        found = {name: part.spread() for name, part in self.members.items()}
        if all(places is None for places in found.values()):
            return None
        return {
            (name, *place)
            for name, places in found.items()
            for place in ([()] if places is None else places)
        }

    def learn(self, places: Collection[Place]) -> None:
        """Tell each member of its own."""
        for name, part in self.members.items():
            part.learn({place[1:] for place in places if place[0] == name})

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Compare the names of the members, then each member."""
        stored = source.trees[item]
        names = set(stored) if isinstance(stored, Mapping) else set()
        report.missing.extend(f"{item}: {name}" for name in self.members if name not in names)
        report.unexpected.extend(
            f"{item}: {name}" for name in sorted(names) if name not in self.members
        )
        for name, member in self.members.items():
            if name in names:
                member.check(subtree(source, item, name), f"{item}/{name}", report)

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Restore each member that is stored."""
        for name, member in self.members.items():
            if name in source.trees[item]:
                member.apply(subtree(source, item, name), f"{item}/{name}", report)
