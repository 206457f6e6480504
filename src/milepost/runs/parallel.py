"""The same for many records of a store: several at a time, where each is a request to a service.

A request to a service takes tens of milliseconds, almost all of which is waiting. On a file system,
and where there are few, one comes after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..stores.base import Store

__all__ = ["each"]

T = TypeVar("T")
R = TypeVar("R")

_NUM_THREADS = 16
_FEW = 4


def each(store: Store, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what an action answers for each of some items, in their order.

    Args:
        store: What the action asks.
        action: Called once for each item, by several threads. Once it has raised, no more are
            begun.
        items: The items.

    Raises:
        BaseException: The first that the action raised.
    """
    if store.traits.is_local or len(items) <= _FEW:
        return [action(item) for item in items]
    answers: dict[int, R] = {}
    errors: list[BaseException] = []
    left = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number = next(left, None)
            if number is None:
                return
            try:
                answers[number] = action(items[number])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

    # No pool: one cannot be used while the interpreter ends, and saves in flight look at their run.
    threads = [
        threading.Thread(target=work, name=f"milepost-look-{number}")
        for number in range(1, min(_NUM_THREADS, len(items)))
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        work()
    except BaseException as error:
        errors.append(error)  # ends the others after what they are at
        raise
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
    return [answers[number] for number in range(len(items))]
