"""The Trainer goes on within an epoch from one rank on many, and from many on one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from milepost.testing.ranks import run_ranks

TRAIN = """
    import milepost as mp
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from milepost.train import Callback

    numbers = torch.arange(50.0).reshape(50, 1)
    data = TensorDataset(numbers, numbers / 50)

    class Seen(Callback):
        def __init__(self):
            self.rows = []

        def batch_start(self, state):
            ids = [int(number) for number in state.batch[0][:, 0]]
            self.rows.append([state.timer.epoch, ids])

    def train(name, until, *, shuffle=True, seed=3, folder=FOLDER, **options):
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        seen = Seen()
        trainer = mp.Trainer(**{
            "model": model,
            "loss_fn": nn.functional.mse_loss,
            "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
            "train_dataloader": DataLoader(data, 3, shuffle=shuffle),
            "max_duration": "2ep", "seed": seed, "callbacks": seen, "progress_bar": False,
            "save_folder": f"{folder}/{name}", "save_interval": "100ba", "resume": "auto",
            **options,
        })
        came = trainer.state.timer.batch
        trainer.fit(until)
        weights = [p.tolist() for p in trainer.state.bare_model.parameters()]
        sample = trainer.state.timer.sample
        trainer.close()
        return {"rows": seen.rows, "came": came, "weights": weights, "sample": sample}
"""


def on_ranks(folder: Path, body: str, num_ranks: int) -> list[dict[str, Any]]:
    return run_ranks(f"    FOLDER = {str(folder)!r}\n{TRAIN}{body}", num_ranks)


def of_epoch(epoch: int, *lives: list[dict[str, Any]], name: str) -> list[int]:
    rows = chain.from_iterable(one[name]["rows"] for life in lives for one in life)
    return sorted(chain.from_iterable(ids for in_epoch, ids in rows if in_epoch == epoch))


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Two ranks, then one, then two, each within the same epoch."""
    folder = tmp_path_factory.mktemp("runs")
    first = """
    give(drawn=train("drawn", "4ba"), alike=train("alike", "4ba"), file=train(
        "file", "4ba", save_format="torch"))
    """
    second = """
    give(drawn=train("drawn", "3ba", seed=99), laid=train("laid", "4ba", shuffle=False))
    give(file=train("file", None, save_format="torch"))
    give(torchs=train("torchs", "4ba"))
    train("alike", "2ba")
    train("alike", "7ba")  # to the end of the epoch
    give(alike=train("alike", "5ba"))
    give(alike_again=train("alike", "3ba"))
    give(straight=train("straight", "17ba", resume="never", load_path_format=FOLDER + "/alike/ba4"))
    """
    third = """
    give(drawn=train("drawn", None), laid=train("laid", None, shuffle=False))
    try:
        train("torchs", None)
    except mp.MismatchError as error:
        give(torchs=str(error))
    """
    return [on_ranks(folder, first, 2), on_ranks(folder, second, 1), on_ranks(folder, third, 2)]


def test_an_epoch_goes_on_on_one_rank_and_on_two_again(lives: list[list[dict[str, Any]]]) -> None:
    """Each sample of both epochs is trained on once, though another seed is given on the way."""
    assert [life[0]["drawn"]["came"] for life in lives] == [0, 4, 7]
    for epoch in (0, 1):
        assert of_epoch(epoch, *lives, name="drawn") == list(range(50))
    assert lives[2][0]["drawn"]["sample"] == 100
    for epoch in (0, 1):
        assert of_epoch(epoch, *lives[:2], name="file") == list(range(50))


def test_what_one_rank_took_as_it_lies_goes_on_on_two(lives: list[list[dict[str, Any]]]) -> None:
    """The order is the same on any number of ranks, whoever dealt it."""
    _, second, third = lives
    assert second[0]["laid"]["rows"] == [[0, [n, n + 1, n + 2]] for n in range(0, 12, 3)]
    for epoch in (0, 1):
        assert of_epoch(epoch, second, third, name="laid") == list(range(50))


def test_an_order_that_torch_drew_on_one_rank_names_the_way_out(
    lives: list[list[dict[str, Any]]],
) -> None:
    """It cannot be dealt further, and one rank can finish the epoch."""
    for one in lives[2]:
        assert "ResumableSampler(dataset" in one["torchs"]
        assert "on one rank to the end of the epoch" in one["torchs"]


def test_one_rank_goes_on_alike_however_often_it_stops(lives: list[list[dict[str, Any]]]) -> None:
    """Also from the end of an epoch that was dealt, into the next one."""
    one = lives[1][0]
    assert one["alike_again"]["weights"] == one["straight"]["weights"]
    assert one["alike"]["rows"][-1][0] == 1
    assert one["straight"]["rows"][-3:] == one["alike_again"]["rows"]
