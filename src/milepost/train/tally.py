"""What ranks tell each other once in a batch, in one message of a few numbers.

    the loss             summed: its mean is the batch's, and is not finite where any part is not
    samples and tokens   summed: the progress is that of all ranks together
    seconds trained      rank 0's clock: intervals in seconds are due at one batch on every rank
    whether to save      rank 0's word, where it finds out how often
    signals              whether any rank was asked to end

The message is sent before the last backward pass of a batch and read after it, so that it travels
while gradients are computed. Every decision that follows from these numbers is the same on every
rank without a further word. Alone there is no message.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .group import Group

__all__ = ["Sums", "Tally", "is_untrue_anywhere"]

_SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A batch of all ranks.

    Attributes:
        loss: Its mean over the ranks.
        num_samples: Samples of all ranks.
        num_tokens: Tokens of all ranks.
        wall_s: Seconds trained, as rank 0 counts them; ``None``: this process counts by itself.
        is_save_due: Whether rank 0 says that a save is due after this batch; alone always ``None``.
        signal_number: A signal that any rank got, if one did; alone always ``None``.
    """

    loss: torch.Tensor
    num_samples: int
    num_tokens: int
    wall_s: float | None = None
    is_save_due: bool | None = None
    signal_number: int | None = None


class Tally:
    """Adds up a batch over all ranks.

    Args:
        group: The ranks.
        signal_number: Returns the signal that this process got, if it did.
        is_save_due: Returns whether a save is due, by what this process knows.
        num_alike: How many ranks train on the same samples, such as those of tensor parallelism.
    """

    def __init__(
        self,
        group: Group,
        *,
        signal_number: Callable[[], int | None],
        is_save_due: Callable[[], bool] = lambda: False,
        num_alike: int = 1,
    ) -> None:
        self._group = group
        self._is_save_due = is_save_due
        self._signal_number = signal_number
        self._num_alike = num_alike
        self._sent: torch.Tensor | None = None
        self._work: Any = None

    def send(
        self,
        loss: torch.Tensor,
        *,
        num_samples: int,
        num_tokens: int,
        wall_s: float,
    ) -> None:
        """Send this rank's part. Every rank must, once in a batch.

        Args:
            loss: The loss of this rank's part of the batch.
            num_samples: Its samples.
            num_tokens: Its tokens.
            wall_s: The seconds trained; rank 0's count.
        """
        if self._group.is_alone:
            self._work = Sums(loss=loss, num_samples=num_samples, num_tokens=num_tokens)
            return
        is_leader = self._group.rank == 0
        clock = wall_s if is_leader else 0.0
        is_due = float(is_leader and self._is_save_due())
        number = self._signal_number()
        got = [float(number == one) for one in _SIGNALS]
        said = [num_samples, num_tokens, clock, is_due, *got]
        numbers = torch.tensor(said, dtype=torch.float64)
        # On the device of the loss: reading the loss here would wait for the device.
        own = loss.detach().reshape(1).double()
        self._sent = torch.cat([own, numbers.to(own.device, non_blocking=True)])
        self._work = dist.all_reduce(self._sent, async_op=True)

    def read(self) -> Sums:
        """Return the sums, once the parts of all ranks are there."""
        work, self._work = self._work, None
        if isinstance(work, Sums):
            return work
        assert self._sent is not None
        work.wait()
        sums = self._sent
        _, samples, tokens, wall_s, is_due, *got = sums.tolist()
        return Sums(
            loss=(sums[0] / self._group.world_size).float(),
            num_samples=int(samples) // self._num_alike,
            num_tokens=int(tokens) // self._num_alike,
            wall_s=wall_s,
            is_save_due=is_due > 0,
            signal_number=next((n for n, was in zip(_SIGNALS, got, strict=True) if was), None),
        )


def is_untrue_anywhere(group: Group, *, device: torch.device, is_true: bool) -> bool:
    """Return whether something is not true on one of the ranks.

    Args:
        group: The ranks, all of which must ask.
        device: Where the group can send from.
        is_true: Whether it is true on this one.
    """
    if group.is_alone:
        return not is_true
    flag = torch.tensor([0.0 if is_true else 1.0], device=device)
    dist.all_reduce(flag)
    return bool(flag.item())
