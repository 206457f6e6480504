"""Recognise what a foreign file holds, and turn it into items by name.

Known layouts: the state and RNG of a Trainer (``{"state": ..., "rng": ...}``), also as Composer
spelt it over the years; VISSL; the dictionaries of hand-written loops, tutorials and Lightning, in
which the weights lie beside the optimizer; and a bare state dict. All pure: no files here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError

__all__ = ["items_of", "name_positions"]

_WRAPPERS = ("module.", "_orig_mod.")
_WEIGHTS = ("model", "model_state_dict", "state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict")
_SCHEDULERS = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict")
_DDP_FLAGS = ("is_model_ddp", "_is_model_ddp", "is_model_ddp_wrapped", "_is_model_ddp_wrapped")


def items_of(value: Any) -> dict[str, Any]:
    """Turn the content of a foreign file into items by name.

    - ``{"state": {...}, "rng": ...}``: every member of the state is an item. Leading underscores of
      old Composer names are dropped, and its RNG states are written as ours are.
    - VISSL's ``classy_state_dict``: the item ``model``, with ``trunk.`` and ``heads.`` before the
      names. Weights only.
    - ``{"model": ..., "optimizer": ..., "scheduler": ...}``, as most loops write it, also with
      ``_state_dict`` behind the names: items of these names. ``state_dict`` is the model too, as
      Lightning has it. What else is there, such as the epoch, is left out.
    - A bare state dict: the item ``model``.

    Prefixes of wrappers (``module.``, ``_orig_mod.``) are taken off when all names have them. An
    optimizer whose parameters are numbered gets names as :func:`name_positions` says.

    Raises:
        FormatError: None of these, or weights under two names; the message lists what was found.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("state"), Mapping) and "param_groups" not in value:
            return _trainer_items(value)
        if isinstance(value.get("classy_state_dict"), Mapping):
            return {"model": _vissl_weights(value["classy_state_dict"])}
        if any(_is_state_dict(value.get(key)) for key in _WEIGHTS):
            return _loop_items(value)
        if _is_state_dict(value):
            return {"model": _without_wrappers(value)}
    raise FormatError(
        f"The file holds none of the known layouts: {_describe(value)}.",
        hint="Load the file with torch, and hand the state dict of the model to load_state_dict.",
    )


def name_positions(optimizer: Any, model: Any) -> Any:
    """Give an optimizer's numbered parameters the names of a model's, where that is certain enough.

    torch numbers parameters in the order the optimizer got them, and a file does not say what that
    order was. It is taken for the order of the model only if there is one group, the model has just
    as many parameters, and the shape of every kept tensor (momentum and the like) equals that of
    the parameter in its place. Otherwise the numbers stay, and a restore reports that they do not
    fit.

    Args:
        optimizer: A state dict of an optimizer, or of several by name.
        model: The state dict of the model. Buffers of batch norm do not count as parameters.

    Returns:
        The optimizer with names, or unchanged.
    """
    if not isinstance(optimizer, Mapping) or not isinstance(model, Mapping):
        return optimizer
    if not _is_numbered(optimizer):
        if "param_groups" in optimizer:
            return optimizer
        return {
            key: name_positions(member, model) if _is_numbered(member) else member
            for key, member in optimizer.items()
        }
    names = _parameter_names(model)
    groups, state = optimizer["param_groups"], optimizer["state"]
    if len(groups) != 1 or sorted(groups[0]["params"]) != list(range(len(names))):
        return optimizer
    name_of = {index: names[place] for place, index in enumerate(groups[0]["params"])}
    kept = {index: value for index, value in state.items() if index in name_of}
    if not all(_fits(value, model[name_of[index]]) for index, value in kept.items()):
        return optimizer
    return {
        **optimizer,
        "param_groups": [{**groups[0], "params": list(name_of.values())}],
        "state": {name_of[index]: value for index, value in kept.items()},
        "other": {key: value for key, value in state.items() if key not in kept},
    }


def _trainer_items(value: Mapping[str, Any]) -> dict[str, Any]:
    stored = value["state"]
    items: dict[str, Any] = {}
    for key, member in stored.items():
        name = str(key)
        plain = name.lstrip("_")
        items[plain if plain and plain not in stored else name] = member
    was_wrapped = any(bool(items.pop(flag.lstrip("_"), False)) for flag in _DDP_FLAGS)
    for flag in _DDP_FLAGS:
        items.pop(flag, None)
    if _is_state_dict(items.get("model")):
        items["model"] = _without_wrappers(items["model"], is_wrapped=was_wrapped)
    if "seed" in value and "rank_zero_seed" not in items:
        items["rank_zero_seed"] = value["seed"]
    if value.get("rng"):
        items["rng"] = _rng(value["rng"])
    for name in ("optimizer", "optimizers"):
        if name in items:
            items[name] = name_positions(items[name], items.get("model"))
    return items


def _loop_items(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what loops keep by habit: the weights, and beside them optimizer and scheduler."""

    def find(keys: Sequence[str], is_such: Callable[[Any], bool]) -> Any:
        found = [key for key in keys if is_such(value.get(key))]
        if len(found) > 1:
            raise FormatError(
                f"The file holds {' and '.join(found)}, and nothing says which one is meant.",
                hint="Load the file with torch, and hand the one you want to load_state_dict.",
            )
        return value[found[0]] if found else None

    items: dict[str, Any] = {"model": _without_wrappers(find(_WEIGHTS, _is_state_dict))}
    optimizer = find(_OPTIMIZERS, _is_optimizer)
    if optimizer is not None:
        items["optimizer"] = name_positions(optimizer, items["model"])
    scheduler = find(_SCHEDULERS, lambda one: isinstance(one, Mapping))
    if scheduler is not None:
        items["scheduler"] = scheduler
    return items


def _vissl_weights(value: Mapping[str, Any]) -> dict[str, Any]:
    base = value.get("base_model")
    model = base.get("model") if isinstance(base, Mapping) else None
    if not isinstance(model, Mapping) or not any(
        _is_state_dict(model.get(part)) for part in ("trunk", "heads")
    ):
        raise FormatError(
            "classy_state_dict holds no base_model/model with a trunk or heads.",
            hint=f"It holds {sorted(map(str, value))[:20]}.",
        )
    return {
        f"{part}.{name}": tensor
        for part in ("trunk", "heads")
        for name, tensor in _without_wrappers(model.get(part) or {}).items()
    }


def _is_state_dict(value: Any) -> bool:
    """Return whether this is names -> tensors, extra state of modules aside."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(type(name) is str for name in value) and all(
        isinstance(member, Tensor) or name.endswith("_extra_state")
        for name, member in value.items()
    )


def _without_wrappers(state: Mapping[str, Any], *, is_wrapped: bool = False) -> dict[str, Any]:
    named = dict(state)
    while named:
        prefix = next((p for p in _WRAPPERS if all(n.startswith(p) for n in named)), None)
        if prefix is None:
            break
        named = {name[len(prefix) :]: value for name, value in named.items()}
    if is_wrapped:
        shorter = {name.removeprefix("module."): value for name, value in named.items()}
        # Two names may not become one: then the prefix is part of a name.
        named = shorter if len(shorter) == len(named) else named
    return named


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= set(value)


def _is_numbered(value: Any) -> bool:
    if not _is_optimizer(value):
        return False
    groups = value["param_groups"]
    return isinstance(groups, Sequence) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), Sequence)
        and all(type(index) is int for index in group["params"])
        for group in groups
    )


def _parameter_names(model: Mapping[str, Any]) -> list[str]:
    """Return the names that can be parameters, of tied ones the first, in the model's order."""
    names: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    for name, value in model.items():
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        parent, _, last = name.rpartition(".")
        counter = f"{parent}.num_batches_tracked" if parent else "num_batches_tracked"
        if last in ("running_mean", "running_var") and counter in model:
            continue
        key = _memory(value)
        if key not in seen:
            seen.add(key)
            names.append(name)
    return names


def _memory(value: Tensor) -> tuple[Any, ...]:
    if value.layout is not torch.strided or value.numel() == 0:
        return (id(value),)
    return (value.data_ptr(), tuple(value.shape), value.stride())


def _fits(kept: Any, parameter: Tensor) -> bool:
    """Return whether what an optimizer keeps belongs to a parameter of this shape."""
    if not isinstance(kept, Mapping):
        return False
    shapes = [tuple(v.shape) for v in kept.values() if isinstance(v, Tensor) and v.dim() > 0]
    return all(shape == tuple(parameter.shape) for shape in shapes)


def _rng(value: Any) -> Any:
    """Return RNG states in the form that this library writes; a list has one for each rank."""
    if isinstance(value, list | tuple):
        return [_rng_of_rank(one) for one in value]
    return _rng_of_rank(value)


def _rng_of_rank(value: Any) -> Any:
    if not isinstance(value, Mapping) or not isinstance(value.get("numpy"), list | tuple):
        return value
    cuda = value.get("cuda")
    try:
        kind, keys, position, has_gauss, gauss = value["numpy"]
        return {
            "python": value["python"],
            "numpy": {
                "kind": str(kind),
                "keys": torch.tensor([int(key) for key in keys], dtype=torch.int64),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
            "torch": value["torch"],
            "accelerator": [cuda] if isinstance(cuda, Tensor) else list(cuda or ()),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"The stored RNG state is malformed: {error!r}.") from error


def _describe(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"a {type(value).__name__} at the top"
    keys = [str(key) for key in value]
    shown = ", ".join(keys[:20])
    return f"keys {shown}" + (f" and {len(keys) - 20} more" if len(keys) > 20 else "")
