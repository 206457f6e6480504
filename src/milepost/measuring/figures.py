"""Figures of a place, and what follows from them for a checkpoint of any size. Nothing is measured.

Two sizes are saved and loaded, a small one and a large one. What a step takes is taken to be a
fixed part and one that grows with the size, as the two of them say.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs", "Limits", "PlaceFigures", "StateFigures", "costs_of"]

_OVERHEAD = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine and the place do at best, without Milepost.

    Attributes:
        copy_bytes_s: Bytes a second from memory to memory that was touched before, by one copy.
        write_bytes_s: Bytes a second until they are durable: past the cache of the kernel, or as
            uploads.
        read_bytes_s: Bytes a second read past the cache of the kernel, or as downloads.
        sync_s: Seconds to make a small file durable; ``None`` where there are no files.
        link_s: Seconds to give a file a second name; ``None`` where that is refused.
        put_s: Seconds to write a small object; ``None`` where there are files.
        get_s: Seconds to read it; ``None`` where there are files.
    """

    copy_bytes_s: float
    write_bytes_s: float
    read_bytes_s: float
    sync_s: float | None = None
    link_s: float | None = None
    put_s: float | None = None
    get_s: float | None = None


@dataclass(frozen=True, slots=True)
class StateFigures:
    """What saving and loading one state took: medians.

    Attributes:
        size_bytes: Its tensors.
        first_blocking_s: How long the first save held up the caller, which includes memory that is
            touched for the first time.
        blocking_s: How long a later one did.
        durable_s: From the call until it was acknowledged.
        load_s: Until the tensors had their values, from a cold cache.
    """

    size_bytes: int
    first_blocking_s: float
    blocking_s: float
    durable_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """What was measured at a place.

    Attributes:
        url: The place.
        num_rounds: How often everything was done.
        took_s: How long that took.
        limits: The best there is.
        small: A small state.
        large: A large state.
    """

    url: str
    num_rounds: int
    took_s: float
    limits: Limits
    small: StateFigures
    large: StateFigures


@dataclass(frozen=True, slots=True)
class Costs:
    """What a checkpoint would cost.

    Attributes:
        size_bytes: Its size.
        first_blocking_s: How long the first save would hold up the training.
        blocking_s: How long a later one would.
        durable_s: How long until it is safe.
        load_s: How long a load would take.
        interval_s: How far apart saves should be at least, so that they hold up the training for 1
            percent of the time and each is safe before the next one begins.
    """

    size_bytes: int
    first_blocking_s: float
    blocking_s: float
    durable_s: float
    load_s: float
    interval_s: float


def costs_of(figures: PlaceFigures, size_bytes: int) -> Costs:
    """Return what a checkpoint of a size would cost at a place."""
    small, large = figures.small, figures.large

    def at_size(small_s: float, large_s: float) -> float:
        rate_s = (large_s - small_s) / max(large.size_bytes - small.size_bytes, 1)
        if rate_s <= 0:  # by chance; then the larger one says more
            return large_s * size_bytes / large.size_bytes
        return max(small_s + (size_bytes - small.size_bytes) * rate_s, 0.0)

    blocking_s = at_size(small.blocking_s, large.blocking_s)
    durable_s = at_size(small.durable_s, large.durable_s)
    return Costs(
        size_bytes=size_bytes,
        first_blocking_s=at_size(small.first_blocking_s, large.first_blocking_s),
        blocking_s=blocking_s,
        durable_s=durable_s,
        load_s=at_size(small.load_s, large.load_s),
        interval_s=max(blocking_s / _OVERHEAD, durable_s),
    )
