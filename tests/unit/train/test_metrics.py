"""Metrics: copied, counted, saved in the middle of an epoch, and given as numbers."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection

from milepost.errors import DuplicateNameError, UsageError
from milepost.train import Evaluator
from milepost.train.metrics import Metrics, scalar_metrics

A = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
B = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])


def test_counting_goes_on_from_a_saved_state() -> None:
    """The training metrics of an epoch that was interrupted are those of the whole epoch."""
    first, second = Metrics(MeanSquaredError()), Metrics(MeanSquaredError())
    first.update(*A)
    second.load_state_dict(first.state_dict())
    second.update(*B)
    assert second.compute()["MeanSquaredError"].item() == (1 + 4 + 9 + 16) / 4


def test_list_states_are_saved_too() -> None:
    """Some metrics keep every value."""

    class Cat(CatMetric):
        def update(self, outputs, targets) -> None:
            super().update(outputs)

    first, second = Metrics(Cat()), Metrics(Cat())
    first.update(*A)
    first.update(*B)
    second.load_state_dict(first.state_dict())
    assert second.compute()["Cat"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_callers_metric_is_left_alone() -> None:
    """It may be in use elsewhere."""
    mine = MeanSquaredError()
    Metrics(mine).update(*A)
    assert mine.update_count == 0


def test_names_come_from_classes_or_collections() -> None:
    """Two of one class need names of their own."""
    named = MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})
    metrics = Metrics(named)
    metrics.update(*A)
    assert set(metrics.compute()) == {"a", "b"}
    with pytest.raises(DuplicateNameError, match="MeanSquaredError"):
        Metrics([MeanSquaredError(), MeanSquaredError()])
    with pytest.raises(UsageError, match="not a torchmetrics"):
        Metrics(["accuracy"])


def test_scalars_are_named_alone_where_that_is_clear() -> None:
    """Retention can name a metric shortly; what is no number is left out."""
    found = scalar_metrics(
        {"a": {"x": torch.tensor(1.0), "y": 2}, "b": {"x": 3.0, "matrix": torch.zeros(2, 2)}}
    )
    assert found == {"a/x": 1.0, "b/x": 3.0, "a/y": 2.0, "y": 2.0}


@pytest.mark.parametrize(
    "options", [{"label": "train"}, {"eval_interval": "soon"}, {"subset_num_batches": 0}]
)
def test_evaluators_that_make_no_sense_are_refused(options) -> None:
    """When they are made, not hours later."""
    with pytest.raises(UsageError):
        Evaluator(**{"label": "a", "dataloader": [], **options})
