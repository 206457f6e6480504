"""Stages: a model of which each rank holds some layers only, as in a pipeline.

Elsewhere all ranks must hold the same names, and a name that only some have is an error. Of a stage
they differ on purpose, which its user says by wrapping it. What is stored is the whole model: the
names of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..errors import UsageError

__all__ = ["Model", "Stage", "modules_of"]


class Stage:
    """Says that a rank holds only some layers of a model, and which.

    The checkpoint holds the layers of all ranks as one model, and goes on with any other split of
    it, one process with the whole model among them. Names must be those of the whole model. An
    optimizer over the parameters of a stage needs no wrapper.

    Args:
        *modules: The module of this rank; several where a rank has several stages.

    Raises:
        UsageError: No module, or something that is none.

    Examples:
        >>> from torch import nn
        >>> layers = nn.ModuleDict({"3": nn.Linear(2, 2)})
        >>> stage = Stage(layers)
    """

    def __init__(self, *modules: nn.Module) -> None:
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise UsageError(
                "A stage is one module or several.",
                hint="Pass the modules that this rank holds: milepost.Stage(module).",
            )
        self.modules = modules


Model = nn.Module | Stage


def modules_of(models: Mapping[str, Model]) -> dict[str, nn.Module]:
    """Return every module of some models by name; of a stage the first has the plain name."""
    found: dict[str, nn.Module] = {}
    for name, model in models.items():
        modules = model.modules if isinstance(model, Stage) else (model,)
        for index, module in enumerate(modules):
            found[f"{name}~{index + 1}" if index else name] = module
    return found
