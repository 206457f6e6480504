"""Buffers that are no part of a module's state, and that a training changes all the same.

``persistent=False`` says that a buffer is computed anew whenever the module is built: a mask, a
table of sines. One that batches change, a counter or a running mean, is lost at a resume, and
nothing shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from .marks import version_of
from .walks import walk_of
from .wrappers import unwrap

__all__ = ["TransientBuffers"]

_SHOWN = 4


class TransientBuffers:
    """Looks whether buffers that are not saved change.

    Args:
        models: Tracked models by name, as they are before the training.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = dict(models)
        # Held, so that no other tensor can take the place of one that is replaced.
        self._before = {
            name: (buffer, version_of(buffer)) for name, buffer in _transient(self._models)
        }

    def note(self) -> str:
        """Return a warning about those that have changed since, or ``""``."""
        changed = []
        for name, buffer in _transient(self._models):
            before, version = self._before.get(name, (None, 0))
            if buffer is not before or version_of(buffer) != version:
                changed.append(name)
        if not changed:
            return ""
        shown = ", ".join(changed[:_SHOWN]) + (" and others" if len(changed) > _SHOWN else "")
        return (
            f"The training changed buffers that are registered with persistent=False ({shown}): "
            "they are not saved, and begin anew after a resume."
        )


def _transient(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for item, model in models.items():
        walk = walk_of(unwrap(model))
        for path, module in zip(walk.module_names, walk.modules(), strict=True):
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers.get(name)
                if buffer is not None:
                    yield f"{item}: {path}.{name}" if path else f"{item}: {name}", buffer
