"""How the objects of a run were set up: what no state dict holds and a training depends on.

The class of each optimizer and scheduler, since the state of one class loads into another and means
something else there. And of each model the modules in another mode (``train`` or ``eval``) and the
parameters that are frozen: a loop that froze a layer in its third epoch does not do so again when
it goes on in the fourth. And the versions that classes of modules give their state: torch hands
them on beside the tensors, so that a class can bring an older form into its present one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .names import named_parameters
from .source import StateSource, load_item, whole_of
from .stages import Stage
from .walks import walk_of
from .wrappers import unwrap
from .zero import class_name

__all__ = ["apply_setup", "capture_setup", "members_of", "setup_problems", "stored_versions"]

_USUAL_VERSION = nn.Module._version

_CLASSES = (Optimizer, LRScheduler, ReduceLROnPlateau)


def capture_setup(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return how tracked objects are set up.

    Args:
        objects: Tracked objects by name, groups among them.

    Returns:
        ``classes``: item, or ``item/member``, to the name of its class; ``models``: item to whether
        it is in training mode, the modules that are not in the mode of the whole, the parameters
        that require no gradients, and the versions of modules whose class says one.
    """
    classes: dict[str, str] = {}
    models: dict[str, Any] = {}
    for label, target in members_of(objects):
        if isinstance(target, _CLASSES):
            classes[label] = class_name(target)
        elif isinstance(target, nn.Module):
            models[label] = _modes([unwrap(target)])
        elif isinstance(target, Stage):
            models[label] = _modes([unwrap(module) for module in target.modules])
    return {"classes": classes, "models": models}


def stored_versions(source: StateSource, item: str) -> Callable[[str], int] | None:
    """Return what tells the version of a module by its name, if the checkpoint says it.

    Args:
        source: Where the model is stored.
        item: Its item, or ``item/member``.
    """
    whole = whole_of(source)
    stored = load_item(whole, "setup") if "setup" in whole.trees else None
    models: Any = stored["models"] if stored is not None and _is_setup(stored) else {}
    versions = models.get(item, {}).get("versions")
    if versions is None:
        return None
    return lambda name: versions.get(name, _USUAL_VERSION)


def setup_problems(stored: Any, objects: Mapping[str, Any]) -> list[str]:
    """Return what does not fit, such as an object of another class, each in a sentence.

    Args:
        stored: From :func:`capture_setup`.
        objects: The objects that are to be restored, by name.
    """
    if not _is_setup(stored):
        return ["What is stored as the setup of the objects is none."]
    then = stored["classes"]
    problems = []
    for label, target in members_of(objects):
        now = class_name(target)
        if isinstance(target, _CLASSES) and then.get(label, now) != now:
            problems.append(f"{label} is of the class {now}, and was saved from {then[label]}.")
    return problems


def apply_setup(stored: Any, objects: Mapping[str, Any]) -> list[str]:
    """Put modules into the mode they were in, and freeze what was frozen.

    Args:
        stored: From :func:`capture_setup`, checked with :func:`setup_problems`.
        objects: The objects that were restored, by name.

    Returns:
        What was changed, each in a sentence.
    """
    models = stored["models"]
    notes: list[str] = []
    for label, target in members_of(objects):
        if label in models and isinstance(target, nn.Module | Stage):
            for module in target.modules if isinstance(target, Stage) else (target,):
                notes += _apply_modes(label, unwrap(module), models[label])
    return notes


def _is_setup(stored: Any) -> bool:
    if not isinstance(stored, Mapping) or set(stored) != {"classes", "models"}:
        return False
    classes, models = stored["classes"], stored["models"]
    if not isinstance(classes, Mapping) or not isinstance(models, Mapping):
        return False
    return all(isinstance(name, str) for name in classes.values()) and all(
        isinstance(modes, Mapping)
        and type(modes.get("is_training")) is bool
        and isinstance(modes.get("others"), list)
        and isinstance(modes.get("frozen"), list)
        and isinstance(modes.get("versions", {}), Mapping)
        for modes in models.values()
    )


def members_of(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ``(label, object)`` of everything tracked, members of groups by themselves."""
    for name, target in objects.items():
        is_group = isinstance(target, Mapping)
        members = target.items() if is_group else [("", target)]
        for member, value in members:
            yield (f"{name}/{member}" if is_group else name), value


def _modes(modules: Sequence[nn.Module]) -> dict[str, Any]:
    is_training = modules[0].training
    others: set[str] = set()
    frozen: set[str] = set()
    versions: dict[str, int] = {}
    for module in modules:
        walk = walk_of(module)
        versions.update(walk.versions)
        is_other = [child.training != is_training for child in walk.modules()]
        others.update(compress(walk.module_names, is_other))
        if walk.is_flat:
            frozen.update(name for name, one in named_parameters(module) if not one.requires_grad)
        else:
            frozen.update(walk.frozen())
    return {
        "is_training": is_training,
        "others": sorted(others),
        "frozen": sorted(frozen),
        "versions": versions,
    }


def _apply_modes(label: str, module: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    others, frozen = frozenset(stored["others"]), frozenset(stored["frozen"])
    notes = []
    moved = []
    walk = walk_of(module)
    for plain, child in zip(walk.module_names, walk.modules(), strict=True):
        is_training = stored["is_training"] != (plain in others)
        if child.training != is_training:
            child.training = is_training
            moved.append(plain or "itself")
    # The mode of the whole is changed by any loop, and that of a part by a decision.
    if moved and "itself" not in moved:
        notes.append(f"{label}: the mode (train or eval) of {_some(moved)} is as it was saved.")
    if not walk.is_flat and walk.frozen() == frozen:
        return notes
    changed = []
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(module):
        names_of.setdefault(parameter, []).append(name)
    for parameter, names in names_of.items():
        is_frozen = not frozen.isdisjoint(names)
        if parameter.requires_grad == is_frozen and parameter.is_leaf:
            parameter.requires_grad_(not is_frozen)
            changed.append(f"{names[0]} is {'frozen' if is_frozen else 'not frozen'}")
    if changed:
        notes.append(f"{label}: as it was saved, {_some(changed)}.")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
