"""The barrier: who is about to change the state waits for the copy of it.

Every optimizer of the process waits before its step, through torch's global hook, so that also one
that nobody told us about does, and one that was built later. A module waits before it loads a state
dict, through a hook that it has until the next step after the copy: a thread that copies cannot
take it away, because torch may be going through the hooks at that moment. A model that is copied or
pickled meanwhile takes nothing of ours with it: what stands in the place of the hook then is a
function of Python that does nothing.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .copying import Copy

__all__ = ["Barrier", "wait_for_copies"]


def wait_for_copies(*_: Any) -> None:
    """Wait for every copy in this process; return at once where there is none.

    Also what optimizers call before they step.

    Raises:
        DeadlineError: A copy is stuck.
    """
    if not (_held or _load_hooks):
        return
    _settle()
    with _lock:
        handles = list(_load_hooks.values())
        _load_hooks.clear()
    for handle in handles:
        handle.remove()


class _LoadHook:
    """Waits before a module loads a state dict. It stays: torch is going through the hooks."""

    def __call__(self, *_: Any) -> None:
        if _held:
            _settle()

    def __reduce__(self) -> tuple[Any, ...]:
        # A chain takes whatever it is called with, looks at none of it, and needs no Milepost.
        return partial, (itertools.chain,)


_lock = threading.RLock()  # memory that is freed in here may end a run, which comes here too
_held: dict[int, Copy] = {}
_load_hooks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_users: WeakSet[Barrier] = WeakSet()
_step_hook: list[Any] = []


def _begin_anew() -> None:
    """In a forked child: no copy goes on there, and a thread that held the lock is gone."""
    global _lock  # noqa: PLW0603 - one for the process
    _lock = threading.RLock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _hook_load(module: Any) -> None:
    if module in _load_hooks or isinstance(module, torch.jit.ScriptModule):
        return  # one that is scripted has no hooks: there a load moves the version counters
    hook = _LoadHook()
    if hasattr(module, "register_load_state_dict_pre_hook"):  # since torch 2.5
        _load_hooks[module] = module.register_load_state_dict_pre_hook(hook)
    else:
        _load_hooks[module] = module._register_load_state_dict_pre_hook(hook)  # noqa: SLF001


def _settle() -> None:
    for key, copy in list(_held.items()):
        copy.settle()
        _held.pop(key, None)


class Barrier:
    """One run's part in the barrier. A run that is dropped without an end leaves it too."""

    def hold(self, copy: Copy, modules: Iterable[nn.Module]) -> None:
        """Have everybody wait for a copy.

        Args:
            copy: The copy, before it is started. It must be started or stopped whatever happens
                here: who waits for it waits until it is over.
            modules: Those whose parameters are being copied.
        """
        with _lock:
            if not _step_hook:
                _step_hook.append(register_optimizer_step_pre_hook(wait_for_copies))
            _users.add(self)
            _held[id(copy)] = copy
            for module in modules:
                _hook_load(module)

    def leave(self) -> None:
        """Wait for what is being copied, and take back the hooks that no other run needs."""
        wait_for_copies()
        with _lock:
            _users.discard(self)
            # Not when a run is merely dropped: an optimizer may be going through its hooks then.
            handles, _step_hook[:] = (list(_step_hook), []) if not _users else ([], _step_hook)
        for handle in handles:
            handle.remove()
