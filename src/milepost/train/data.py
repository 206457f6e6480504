"""What a loader yields: how to split it, count it and move it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError

__all__ = ["DataSpec", "count_samples", "move_batch", "split_batch", "tensors_of"]

Batch = Any


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a batch: the length of dimension 0 of all its tensors.

    Raises:
        UsageError: No tensor, a tensor without dimensions, or different lengths.
    """
    lengths = {_length(tensor) for tensor in tensors_of(batch)}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "no tensor"
        raise UsageError(
            f"Cannot tell how many samples the batch has: {found} along dimension 0.",
            hint="Pass DataSpec(loader, get_num_samples_in_batch=...).",
        )
    return lengths.pop()


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch along dimension 0 into at most ``num_parts`` parts of nearly equal size.

    Tensors, tuples, named tuples, lists and dicts are split; fewer samples than parts give fewer
    parts. With one part the batch itself is returned.

    Raises:
        UsageError: The batch holds something that cannot be split.
    """
    if num_parts <= 1:
        return [batch]
    return _split(batch, min(num_parts, max(1, count_samples(batch))))


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on the device; anything else is left as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return _like(batch, {key: move_batch(value, device) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _sequence(batch, [move_batch(value, device) for value in batch])
    return batch


class DataSpec:
    """A loader with what the trainer must know about its batches.

    Args:
        dataloader: Any iterable of batches: ``DataLoader``, ``StatefulDataLoader``, ...
        num_samples: Samples of one epoch, where it is not ``len(dataloader.dataset)``.
        num_tokens: Tokens of one epoch, where that is known.
        device_transforms: Applied to each batch once it is on the device.
        split_batch: ``(batch, num_parts) -> parts``, for batches of an unusual kind.
        get_num_samples_in_batch: ``batch -> samples``; by default the length of dimension 0.
        get_num_tokens_in_batch: ``batch -> tokens``; by default 0.
    """

    def __init__(
        self,
        dataloader: Iterable[Batch],
        *,
        num_samples: int | None = None,
        num_tokens: int | None = None,
        device_transforms: Callable[[Batch], Batch] | None = None,
        split_batch: Callable[[Batch, int], Sequence[Batch]] | None = None,
        get_num_samples_in_batch: Callable[[Batch], int] | None = None,
        get_num_tokens_in_batch: Callable[[Batch], int] | None = None,
    ) -> None:
        self.dataloader = dataloader
        self.num_samples = _dataset_length(dataloader) if num_samples is None else num_samples
        self.num_tokens = num_tokens
        self.device_transforms = device_transforms or _unchanged
        self.split_batch: Callable[[Batch, int], Sequence[Batch]] = split_batch or _default_split
        self.get_num_samples_in_batch = get_num_samples_in_batch or count_samples
        self.get_num_tokens_in_batch = get_num_tokens_in_batch or _no_tokens

    @classmethod
    def of(cls, data: DataSpec | Mapping[str, Any] | Iterable[Batch]) -> DataSpec:
        """Return a spec from what users pass: a spec, its arguments as a dict, or a loader.

        Raises:
            UsageError: None of these.
        """
        if isinstance(data, DataSpec):
            return data
        if isinstance(data, Mapping):
            known = inspect.signature(cls).parameters
            unknown = [str(key) for key in data if key not in known]
            if unknown or "dataloader" not in data:
                raise UsageError(
                    "A dict in the place of a loader holds the arguments of DataSpec, not "
                    f"{', '.join(map(repr, unknown)) or 'all but dataloader'}.",
                    hint=f"Its keys are: {', '.join(known)}.",
                )
            return cls(**data)
        if not callable(getattr(data, "__iter__", getattr(data, "__getitem__", None))):
            raise UsageError(
                f"{data!r} is no loader: it cannot be iterated.",
                hint="Give an iterable of batches, a DataSpec, or its arguments as a dict.",
            )
        return cls(data)


def _default_split(batch: Batch, num_parts: int) -> list[Batch]:
    return split_batch(batch, num_parts)


def _unchanged(batch: Batch) -> Batch:
    return batch


def _no_tokens(_batch: Batch) -> int:
    return 0


def _dataset_length(dataloader: Iterable[Batch]) -> int | None:
    try:
        return len(dataloader.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, NotImplementedError):
        return None


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors in a batch, in their order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, list | tuple):
        return [tensor for value in batch for tensor in tensors_of(value)]
    return []


def _length(tensor: torch.Tensor) -> int:
    if tensor.ndim == 0:
        raise UsageError(
            "Cannot tell how many samples the batch has: one of its tensors has no dimension.",
            hint="Pass DataSpec(loader, get_num_samples_in_batch=...).",
        )
    return int(tensor.shape[0])


def _split(batch: Batch, num_parts: int) -> list[Batch]:
    if isinstance(batch, torch.Tensor):
        return list(torch.tensor_split(batch, num_parts))
    if isinstance(batch, Mapping):
        columns = {key: _split(value, num_parts) for key, value in batch.items()}
        return [
            _like(batch, {key: parts[index] for key, parts in columns.items()})
            for index in range(num_parts)
        ]
    if isinstance(batch, list | tuple):
        if not tensors_of(batch):
            # The same bounds as tensor_split: the first parts get the samples left over.
            short, left_over = divmod(len(batch), num_parts)
            bounds = [short * index + min(index, left_over) for index in range(num_parts + 1)]
            return [batch[a:b] for a, b in itertools.pairwise(bounds)]
        parts = [_split(value, num_parts) for value in batch]
        return [_sequence(batch, list(row)) for row in zip(*parts, strict=True)]
    raise UsageError(
        f"Cannot split a batch that holds a {type(batch).__name__}.",
        hint="Pass DataSpec(loader, split_batch=...).",
    )


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]


def _sequence(batch: Sequence[Any], values: list[Any]) -> Sequence[Any]:
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return type(batch)(values)  # type: ignore[call-arg]
