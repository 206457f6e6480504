"""Tiny trainings whose every number can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from milepost.train import Callback, Event, State, Trainer


class Seen(Callback):
    """Notes every event, and the ids of every batch."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ids: list[list[int]] = []
        self.counters: list[dict[str, Any]] = []

    def run_event(self, event: Event, state: State) -> None:
        self.events.append(event)
        if event is Event.BATCH_START:
            inputs, _ = state.batch_pair
            self.ids.append([int(value) for value in inputs.flatten()])
            self.counters.append(state.timer.snapshot())


class At(Callback):
    """Calls a function at one event, once a condition on the state holds."""

    def __init__(
        self,
        event: Event,
        call: Callable[[State], Any],
        *,
        when: Callable[[State], bool] = lambda _: True,
    ) -> None:
        self.event, self.call, self.when = event, call, when

    def run_event(self, event: Event, state: State) -> None:
        if event is self.event and self.when(state):
            self.call(state)


def numbers(count: int = 40, batch: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader of the numbers 0 to count-1 as inputs, with targets of twice that."""
    inputs = torch.arange(count, dtype=torch.float32).reshape(-1, 1)
    data = torch.utils.data.TensorDataset(inputs, 2 * inputs)
    return DataLoader(data, batch_size=batch, **options)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny layers on several threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Callable[..., Trainer]:
    """Return a function that makes a trainer of a linear model on numbers."""

    def _make(**options: Any) -> Trainer:
        torch.manual_seed(0)
        model = options.pop("model", None) or torch.nn.Linear(1, 1)
        optimizer = options.pop("optimizers", None)
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        options.setdefault("train_dataloader", numbers())
        options.setdefault("max_duration", "2ep")
        options.setdefault("loss_fn", torch.nn.functional.mse_loss)
        options.setdefault("seed", 1)
        options.setdefault("progress_bar", False)
        return Trainer(model=model, optimizers=optimizer, **options)

    return _make


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def at() -> type[At]:
    return At


@pytest.fixture
def loader_of() -> Callable[..., DataLoader[Any]]:
    return numbers
