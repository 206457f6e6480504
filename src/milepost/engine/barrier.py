"""The barrier: who is about to change the state waits for the copy of it.

Every optimizer of the process waits before its step, through torch's global hook, so that also one
that nobody told us about does, and one that was built later. A module waits before it loads a state
dict, through a hook that it has for as long as the copy may go on. What torch calls, it finds by
name in this file: a model that is copied or pickled meanwhile takes nothing of ours with it but
that name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .copying import Copy

__all__ = ["Barrier", "wait_for_copies"]

_lock = threading.Lock()
_held: dict[int, Copy] = {}
_load_hooks: list[Any] = []
_users: set[int] = set()
_step_hook: list[Any] = []


def wait_for_copies(*_: Any) -> None:
    """Wait for every copy in this process; return at once where there is none.

    Also what optimizers call before they step.
    """
    if not (_held or _load_hooks):
        return
    _settle()
    with _lock:
        handles, _load_hooks[:] = list(_load_hooks), []
    for handle in handles:
        handle.remove()


def _before_load(*_: Any) -> None:
    """Wait before a module loads a state dict. Hooks stay: torch is going through them."""
    if _held:
        _settle()


def _hook_load(module: Any) -> Any:
    if hasattr(module, "register_load_state_dict_pre_hook"):  # since torch 2.5
        return module.register_load_state_dict_pre_hook(_before_load)
    return module._register_load_state_dict_pre_hook(_before_load)  # noqa: SLF001 - torch 2.4


def _settle() -> None:
    for key, copy in list(_held.items()):
        copy.settle()
        _held.pop(key, None)


class Barrier:
    """One run's part in the barrier."""

    def hold(self, copy: Copy, modules: Iterable[nn.Module]) -> None:
        """Have everybody wait for a copy.

        Args:
            copy: The copy, before it is started.
            modules: Those whose parameters are being copied.
        """
        with _lock:
            if not _users:
                _step_hook.append(register_optimizer_step_pre_hook(wait_for_copies))
            _users.add(id(self))
            _held[id(copy)] = copy
            _load_hooks.extend(map(_hook_load, modules))

    def leave(self) -> None:
        """Wait for what is being copied, and take back the hooks."""
        wait_for_copies()
        with _lock:
            _users.discard(id(self))
            handles, _step_hook[:] = (list(_step_hook), []) if not _users else ([], _step_hook)
        for handle in handles:
            handle.remove()
