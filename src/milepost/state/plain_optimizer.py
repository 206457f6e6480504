"""The state of an optimizer by the names of its parameters, without asking it for numbers first.

A state dict of torch has numbers in the place of parameters, which are then replaced by names. Of
an optimizer that has the methods of ``torch.optim.Optimizer`` for this, and no hooks, the names are
noted once. They are used again while the same parameters stand in the same groups and the same ones
have a state.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from .names import ParameterNames

__all__ = ["PlainOptimizer"]

_STATE_DICT = Optimizer.state_dict  # as it is before anybody puts another in its place
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


class PlainOptimizer:
    """The names of what an optimizer has.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names: ParameterNames | None = None
        self._groups: list[list[int]] = []
        self._group_names: list[list[str]] = []
        self._holders: list[int] = []
        self._holder_names: list[str] = []

    def state(self, names: ParameterNames) -> dict[str, Any] | None:
        """Return its state now, in the form of ``OptimizerPart.capture``.

        Args:
            names: The names of all parameters; the very ones of the last time if none has changed.

        Returns:
            The state; ``None`` if only the optimizer can tell.
        """
        optimizer = self._optimizer
        if not _is_plain(optimizer):
            return None
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        holders = list(map(id, optimizer.state))
        is_known = names is self._names and groups == self._groups and holders == self._holders
        if not is_known and not self._learn(names, groups, holders):
            return None
        return {
            "state": dict(zip(self._holder_names, optimizer.state.values(), strict=True)),
            "param_groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "params": list(found)}
                for group, found in zip(optimizer.param_groups, self._group_names, strict=True)
            ],
            "other": {},
        }

    def _learn(self, names: ParameterNames, groups: list[list[int]], holders: list[int]) -> bool:
        """Note the names; return whether all that has a state is a parameter."""
        self._names = None
        name_of = {
            number: names.first.get(number) or f"group{g}/{i}"
            for g, numbers in enumerate(groups)
            for i, number in enumerate(numbers)
        }
        if len(name_of) != sum(map(len, groups)) or not name_of.keys() >= set(holders):
            return False
        self._names, self._groups, self._holders = names, groups, holders
        self._group_names = [[name_of[number] for number in numbers] for numbers in groups]
        self._holder_names = [name_of[number] for number in holders]
        return True


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether its state dict is that of any optimizer."""
    own = vars(optimizer)
    return (
        type(optimizer).state_dict is _STATE_DICT
        and "state_dict" not in own
        and not any(own.get(hooks) for hooks in _HOOKS)
        and type(optimizer.state) in (dict, defaultdict)
        and all(type(group) is dict for group in optimizer.param_groups)
    )
