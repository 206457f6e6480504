"""What the state dict of a module holds, without asking each module for it.

``Module.state_dict()`` calls two functions for every module, and makes an alias of every tensor.
Where all modules are plain it does nothing else than to go through their tables, in their order. So
the names are noted once, and from then on the tables are gone through all together.

A module is plain if it has the methods of ``nn.Module`` for this, and no hooks. If one of a tree is
not, or if a value is more than a tensor, the whole tree is asked in the usual way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn

from ..tensors.pack import PLAIN_TENSORS

__all__ = ["PlainState", "loads_plainly"]

_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_methods_of = attrgetter(*_METHODS)
_PLAIN_METHODS = _methods_of(nn.Module)  # as they are before anybody puts others in their place
_tables_of = itemgetter("_parameters", "_buffers")
_hooks_of = itemgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_load_hooks_of = itemgetter(*_LOAD_HOOKS)
_transient_of = itemgetter("_non_persistent_buffers_set")
_TABLES = frozenset({dict, OrderedDict})


def loads_plainly(module: nn.Module, members: Sequence[nn.Module]) -> bool:
    """Return whether loading a state dict would do no more than copy into each tensor.

    Args:
        module: The module.
        members: All modules in it, itself among them.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    if not all(map(_loads_plainly, set(map(type, members)))):
        return False
    own = list(map(vars, members))
    if [one for one in own if "load_state_dict" in one or "_load_from_state_dict" in one]:
        return False  # of one module a method was replaced
    try:
        return not any(chain.from_iterable(map(_load_hooks_of, own)))
    except KeyError:  # it keeps them in a way of its own
        hooks = (getattr(one, name) for one in members for name in _LOAD_HOOKS)
        return not any(hooks)


def _loads_plainly(cls: type[nn.Module]) -> bool:
    # What modules of torch do beside it is for names and shapes that are not what they were.
    own = cls._load_from_state_dict
    return own is nn.Module._load_from_state_dict or own.__module__.startswith("torch.nn.")


class PlainState:
    """The names in the state dict of a module, and where the values are.

    To be used as long as the module consists of the same; see ``walks.py``.

    Args:
        named: Name and module of every place in the tree, in its order.
        clean: Frees a name from wrappers.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]], clean: Callable[[str], str]) -> None:
        self._classes = {type(one) for _, one in named}
        self._names: list[str] = []
        self._is_stored: list[bool] = []
        self._transient = [
            frozenset(getattr(one, "_non_persistent_buffers_set", ())) for _, one in named
        ]
        for (path, member), transient in zip(named, self._transient, strict=True):
            prefix = f"{path}." if path else ""
            self._is_stored += [False] * len(member._modules)
            for table, left_out in ((member._parameters, ()), (member._buffers, transient)):
                for key, value in table.items():
                    is_stored = value is not None and key not in left_out
                    self._is_stored.append(is_stored)
                    if is_stored:
                        self._names.append(clean(prefix + key))
        # Of two that would have one name the usual way tells.
        self._is_clear = len(set(self._names)) == len(self._names)

    def state(
        self, members: Sequence[nn.Module], values: Sequence[Any]
    ) -> dict[str, Tensor] | None:
        """Return the values by clean name; ``None`` if the module has to be asked.

        Args:
            members: The module of every place, in order.
            values: What is in their tables: of each its modules, parameters and buffers.
        """
        if not self._is_clear or any(_methods_of(one) != _PLAIN_METHODS for one in self._classes):
            return None
        own = list(map(vars, members))
        try:
            if any(chain.from_iterable(map(_hooks_of, own))):
                return None
            tables = list(chain.from_iterable(map(_tables_of, own)))
            transient = list(map(_transient_of, own))
        except KeyError:  # it keeps them in a way of its own
            return None
        if [one for one in own if "state_dict" in one or "_save_to_state_dict" in one]:
            return None  # of one module a method was replaced
        if transient != self._transient or not _TABLES.issuperset(map(type, tables)):
            return None
        if len(values) != len(self._is_stored):
            return None  # changed by whoever was asked for a state before
        found = list(compress(values, self._is_stored))
        if not set(map(type, found)).issubset(PLAIN_TENSORS):
            return None
        return dict(zip(self._names, found, strict=True))
