"""What others do to the memory of tensors while it is copied, and what we leave of ours on it.

Copies are held back until a test lets them go, so that what comes between is certain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine import stage
from milepost.engine.copying import Copy

SIZE = 256  # 256 KiB a matrix


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold copies back until this is set."""
    event, original = threading.Event(), Copy._copy

    def held(copy: Copy, one: Any) -> None:
        assert event.wait(30)
        original(copy, one)

    monkeypatch.setattr(Copy, "_copy", held)
    yield event
    event.set()


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())
    model = nn.Sequential(encoder, nn.Linear(SIZE, SIZE))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_saved(checkpoint: mp.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    found = checkpoint.load()["state"]["model"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_model_handed_to_another_process_fails_one_save_and_ends_nothing(
    tmp_path: Path, go: threading.Event
) -> None:
    """Its memory is given back, and another process may write to where it is now."""
    model, optimizer = trained()
    run = mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer).open()
    pending = run.save("a")
    model.share_memory()
    go.set()
    error = pending.exception(30)
    assert isinstance(error, mp.StateChangedError)
    assert error.facts["names"] == ["model/0.0.weight"]
    go.clear()
    again = run.save("b")  # nothing of it is copied late, so that nothing is waited for
    assert_saved(again.wait(30), values(model))
    assert again.stats["late_bytes"] == 0
    waited = run.save("c", wait=True)
    assert waited.stats["late_bytes"] == 0
    run.close()


def test_what_is_moved_after_the_copy_is_found_too(tmp_path: Path) -> None:
    """What is found must not depend on which thread was faster: it would come and go."""
    tensor = torch.randn(SIZE, SIZE)
    from milepost.engine.copying import LateTensor
    from milepost.engine.sums import Sums
    from milepost.tensors.memory import host_bytes

    place = host_bytes(torch.zeros(SIZE, SIZE))
    one = LateTensor.of("x", tensor, place=place, start_bytes=0, check="sample", shift=1)
    sums = Sums([(0, place.nbytes)], lambda start, stop: place.data[start:stop])
    copy = Copy([one], end_bytes=tensor.nbytes, sums=sums)
    copy.start()
    copy.require()
    tensor.share_memory_()
    with pytest.raises(mp.StateChangedError, match="x changed"):
        copy.confirm()


def test_other_memory_under_a_parameter_is_no_write(tmp_path: Path, go: threading.Event) -> None:
    """Weights that are swapped by reference leave those of the save as they were."""
    model, optimizer = trained()
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        pending = run.save("a")
        model[1].weight.data = torch.zeros(SIZE, SIZE)
        go.set()
        assert_saved(pending.wait(30), before)


def test_a_module_within_a_model_waits_before_it_loads(tmp_path: Path, go: threading.Event) -> None:
    """A pretrained encoder is loaded by itself, into the middle of a model."""
    model, optimizer = trained()
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        for number, part in enumerate((model[1], model[0], model[0][0])):
            go.clear()
            before = values(model)
            pending = run.save(f"s{number}")
            threading.Timer(0.05, go.set).start()
            part.load_state_dict({name: value + 1 for name, value in values(part).items()})
            assert go.is_set()
            assert_saved(pending.wait(30), before)
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_noise_on_a_few_rows_between_two_steps_does_not_reach_a_checkpoint(
    tmp_path: Path, go: threading.Event, kind: type[nn.Module]
) -> None:
    """As adversarial training does it: around the counter, and where no sample is taken."""
    torch.manual_seed(0)
    model = kind(SIZE, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [torch.arange(4).view(2, 2) for _ in range(3)]
    with mp.Checkpointer(
        tmp_path, staging="auto", every="1ba", model=model, optimizer=optimizer, loader=data
    ) as run:
        for _ in run.epochs(1):
            for number, x in enumerate(run.batches(data)):
                before = model.weight.detach().clone()
                model.weight.data[100] += 1
                if number:
                    go.set()
                    pending = run.last_save
                    assert pending is not None
                    assert_saved(pending.wait(30), {"weight": before})
                    # What the optimizer keeps for it is copied late.
                    assert number == 1 or pending.stats["late_bytes"] == SIZE * SIZE * 4
                model.weight.data[100] = before[100]
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                go.clear()
        go.set()


def test_without_a_safe_way_to_read_everything_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: threading.Event
) -> None:
    """A sandbox may forbid the call: then a save blocks for longer, and is as good."""
    monkeypatch.setattr(stage, "can_peek", lambda: False)
    model, optimizer = trained()
    with mp.Checkpointer(tmp_path, staging="overlap", model=model, optimizer=optimizer) as run:
        before = values(model)
        pending = run.save("a")
        with torch.no_grad():
            model[1].weight.zero_()
        assert_saved(pending.wait(30), before)
        assert pending.stats["late_bytes"] == 0
        assert "process_vm_writev" in pending.stats["eager_reason"]
        assert not go.is_set()


@pytest.mark.parametrize("staging", ["eager", "overlap"])
def test_tensors_can_be_resized_after_saves_and_loads(tmp_path: Path, staging: Any) -> None:
    """The memory is the user's: what looks at it must not tie it down for ever."""
    model, optimizer = trained()
    model.register_buffer("bank", torch.zeros(SIZE, SIZE))
    model[0].requires_grad_(requires_grad=False)
    with mp.Checkpointer(tmp_path, staging=staging, model=model, optimizer=optimizer) as run:
        for name in "ab":
            run.save(name, wait=True)
        run.restore("a")
        run.save("c").wait(30)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(one.untyped_storage().resizable() for one in tensors)
    bank: Any = model.bank
    bank.resize_(2 * SIZE, SIZE).fill_(1)
    assert bank.sum() == 2 * SIZE * SIZE
