"""What stands where in a module, as its state dict has it.

Not by ``named_modules()``, ``named_parameters()`` and their like: a class may show less there, such
as only what is trained, or a part as one piece. ``state_dict()`` goes by the tables, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ["buffers_in", "parameters_in", "places_in"]


def places_in(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every place; a module that stands at two of them comes twice.

    Args:
        module: The module, which comes first.
        path: Its own name.
    """
    yield path, module
    for key, member in module._modules.items():
        if member is not None:
            yield from places_in(member, f"{path}.{key}" if path else key)


def parameters_in(places: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters by name, tied ones under all their names."""
    for path, member in places:
        for key, value in member._parameters.items():
            if value is not None:
                yield f"{path}.{key}" if path else key, value


def buffers_in(places: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers by name, those that are not stored among them."""
    for path, member in places:
        for key, value in member._buffers.items():
            if value is not None:
                yield f"{path}.{key}" if path else key, value
