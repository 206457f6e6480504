"""The numerical precision of the forward pass and the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch

from ..errors import UsageError

__all__ = ["Precision", "check_precision", "choose_scaler"]


class Precision(str, Enum):
    """How numbers are computed with. Weights and optimizer state stay as they are.

    ``FP32``: as the model is. ``AMP`` and ``AMP_FP16``: mixed precision in 16-bit floats, with a
    gradient scaler; needs an accelerator. ``AMP_BF16``: mixed precision in bfloat16.
    """

    FP32 = "fp32"
    AMP = "amp"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @classmethod
    def of(cls, value: Precision | str) -> Precision:
        """Return the precision of a name.

        Raises:
            UsageError: No such precision.
        """
        try:
            return cls(value.lower())
        except (ValueError, AttributeError) as error:
            raise UsageError(
                f"{value!r} is not a precision; use one of {', '.join(p.value for p in cls)}."
            ) from error

    @property
    def is_fp16(self) -> bool:
        """Return whether gradients need a scaler."""
        return self in (Precision.AMP, Precision.AMP_FP16)

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass and the loss are computed.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...
        """
        if self is Precision.FP32:
            return nullcontext()
        dtype = torch.float16 if self.is_fp16 else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype)

    def __str__(self) -> str:
        return self.value


def check_precision(precision: Precision, device: torch.device) -> None:
    """Refuse a precision the device cannot compute in.

    Raises:
        UsageError: 16-bit floats without an accelerator, or bfloat16 on a GPU without it.
    """
    if precision.is_fp16 and device.type == "cpu":
        raise UsageError(
            f"precision={precision.value!r} needs an accelerator, and the model is on the CPU.",
            hint='Use precision="amp_bf16" or "fp32", or move the model to an accelerator first.',
            precision=precision.value,
            device=str(device),
        )
    if (
        precision is Precision.AMP_BF16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported()
    ):
        raise UsageError(
            f"precision='amp_bf16' is not supported by {torch.cuda.get_device_name(device)}.",
            hint='Use precision="amp_fp16" or "fp32".',
            precision=precision.value,
            device=str(device),
        )


def choose_scaler(precision: Precision, device: torch.device, *, given: Any) -> Any:
    """Return the gradient scaler of a training: the one given, one that is needed, or ``None``.

    Raises:
        UsageError: The device cannot compute in this precision.
    """
    check_precision(precision, device)
    if given is not None:
        return given
    return torch.amp.GradScaler(device.type) if precision.is_fp16 else None
