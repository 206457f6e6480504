"""The files of a checkpoint: readable by plain tools, shared where nothing changed."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors import safe_open
from torch import nn

import milepost as mp
from milepost.stores import LocalStore


def new_model(*, frozen=True):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(not frozen)
    return model


def inode(folder, file):
    return (folder / file).stat().st_ino


FROZEN = "model-frozen.safetensors"


def test_weights_open_with_plain_safetensors_under_their_own_names(tmp_path):
    """No tool needs to know us to read the weights."""
    model = new_model(frozen=False)
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(file.get_tensor(name), value)
    assert not (tmp_path / "a" / "model.safetensors.index.json").exists()


def test_frozen_and_trained_weights_are_two_parts_with_an_index(tmp_path):
    """In the form that other tools know: every key, and the file that holds it."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
    table = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert set(table["weight_map"]) == set(model.state_dict())
    found = {}
    for file in set(table["weight_map"].values()):
        with safe_open(tmp_path / "a" / file, "pt") as part:
            found.update({name: (file, part.get_tensor(name)) for name in part.keys()})  # noqa: SIM118
    for name, value in model.state_dict().items():
        file, stored = found[name]
        assert table["weight_map"][name] == file
        assert torch.equal(stored, value)
        assert (file == FROZEN) == name.startswith("0.")


def test_an_unchanged_frozen_part_is_shared_and_outlives_its_origin(tmp_path):
    """It is written once, and every checkpoint is whole by itself."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model, keep=[mp.KeepLast(1)]) as run:
        run.save("a", wait=True)
        first = inode(tmp_path / "a", FROZEN)
        with torch.no_grad():
            model[2].weight.add_(1)
        run.save("b", wait=True)
        assert inode(tmp_path / "b", FROZEN) == first
        assert not (tmp_path / "a").exists()
        latest = run.run.latest()
        assert latest.manifest.file(FROZEN).linked_from == "a"
        assert latest.verify().is_good
        run.save("c", wait=True)
        assert inode(tmp_path / "c", FROZEN) == first
    stored = mp.open_run(tmp_path).latest().load()["state"]["model"]
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["data", "no_grad", "nan", "minus zero"])
def test_one_changed_frozen_value_is_written_however_it_was_changed(tmp_path, how):
    """A write through .data moves no version counter; the bytes are compared."""
    model = new_model()
    model[0].bias.data.zero_()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        if how == "data":
            model[0].weight.data[3, 3] = 7
        elif how == "nan":
            model[0].weight.data[0, 0] = float("nan")
            run.save("between", wait=True)
            assert inode(tmp_path / "between", FROZEN) != inode(tmp_path / "a", FROZEN)
            run.save("same", wait=True)
            assert inode(tmp_path / "same", FROZEN) == inode(tmp_path / "between", FROZEN)
            model[0].weight.data[0, 0] = 1.0
        elif how == "minus zero":
            model[0].bias.data[1] = -0.0
        else:
            with torch.no_grad():
                model[0].weight[0, 0] = 5
        stored = run.save("b").wait().load()["state"]["model"]
    assert inode(tmp_path / "b", FROZEN) != inode(tmp_path / "a", FROZEN)
    for name, value in model.state_dict().items():
        raw = [one.reshape(-1).view(torch.uint8) for one in (stored[name], value)]
        assert torch.equal(*raw)


def test_after_a_failed_save_nothing_is_shared_with_it(tmp_path, monkeypatch):
    """The change was staged, and never reached the disk."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        model[0].weight.data[0, 0] = 5
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "sync_folder", refuse)
            assert run.save("bad").exception(30) is not None
        stored = run.save("b").wait().load()["state"]["model"]
        assert stored["0.weight"][0, 0] == 5
        assert inode(tmp_path / "b", FROZEN) != inode(tmp_path / "a", FROZEN)
        run.save("c", wait=True)
        assert inode(tmp_path / "c", FROZEN) == inode(tmp_path / "b", FROZEN)
    assert mp.open_run(tmp_path).latest().verify().is_good


def refuse(self, folder):
    raise mp.StorageError("boom")


def test_a_failed_save_of_unchanged_weights_still_shares_the_last_whole_part(tmp_path, monkeypatch):
    """And a part whose origin was deleted by hand is written anew."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "sync_folder", refuse)
            assert run.save("bad").exception(30) is not None
        run.save("b", wait=True)
        assert inode(tmp_path / "b", FROZEN) == inode(tmp_path / "a", FROZEN)
        (tmp_path / "b" / FROZEN).unlink()
        assert run.save("c").wait().verify().is_good


def test_links_can_be_declined(tmp_path):
    """For a folder that is copied by tools that do not know hard links."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model, link_unchanged=False) as run:
        run.save("a", wait=True)
        run.save("b", wait=True)
    assert inode(tmp_path / "a", FROZEN) != inode(tmp_path / "b", FROZEN)
    assert (tmp_path / "b" / FROZEN).stat().st_nlink == 1


def test_freezing_and_unfreezing_moves_weights_between_the_parts(tmp_path):
    """A change of what is trained is a change of the layout, not of the state."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        model[0].requires_grad_(True)
        run.save("b", wait=True)
        assert not (tmp_path / "b" / FROZEN).exists()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        run.save("c", wait=True)
    for one in mp.open_run(tmp_path).checkpoints():
        assert one.verify().is_good
        stored = one.load()["state"]["model"]
        assert all(torch.equal(stored[n], value) for n, value in model.state_dict().items())


def test_a_diagnostic_checkpoint_shares_nothing(tmp_path):
    """It may be deleted by anybody at any time."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        run.save_diagnostic("nan", "ba1", extra={"batch": torch.ones(2)})
        assert (tmp_path / "nan" / "ba1" / FROZEN).stat().st_nlink == 1
        run.save("b", wait=True)
    assert all(one.verify().is_good for one in mp.open_run(tmp_path).checkpoints(all=True))


def test_one_checkpoint_can_be_copied_and_opened_alone(tmp_path):
    """Everything in it is relative."""
    import shutil

    model = new_model()
    with mp.Checkpointer(tmp_path / "run", model=model) as run:
        run.save("a", wait=True)
        run.save("b", wait=True)
    shutil.copytree(tmp_path / "run" / "b", tmp_path / "elsewhere")
    live = new_model()
    with torch.no_grad():
        live[0].weight.zero_()
    with mp.Checkpointer(tmp_path / "other", model=live) as run:
        run.load_weights(tmp_path / "elsewhere", live, strict=True)
    assert torch.equal(live[0].weight, model[0].weight)


@pytest.mark.parametrize("num_bytes", [64, 4096])
def test_a_shared_part_that_was_cut_short_is_written_again(tmp_path, caplog, num_bytes):
    """Linked once more it would make this save, and every later one, fail."""
    model = new_model()
    with mp.Checkpointer(tmp_path, model=model) as run:
        run.save("a", wait=True)
        with (tmp_path / "a" / FROZEN).open("r+b") as part:
            part.truncate(num_bytes)
        for name in "bc":
            run.save(name, wait=True)
    found = {one.name: one for one in mp.open_run(tmp_path).checkpoints()}
    assert not found["a"].verify().is_good
    for name in "bc":
        assert found[name].verify(level="full").is_good
    assert found["b"].manifest.file(FROZEN).linked_from is None
    assert found["c"].manifest.file(FROZEN).linked_from == "b"
    assert [one for one in caplog.messages if FROZEN in one and " of a in " in one]


def test_additions_of_several_threads_to_the_metadata_are_all_kept(tmp_path):
    """Each reads what is there and writes all of it."""
    with mp.Checkpointer(tmp_path, model=new_model()) as run:
        run.save("a", wait=True)
    threads = [
        threading.Thread(
            target=lambda n=n: mp.open_run(tmp_path).get("a").update_metadata({str(n): n})
        )
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = {str(n): n for n in range(16)}
    assert mp.open_run(tmp_path).get("a").get_metadata() == expected
