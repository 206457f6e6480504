"""Models and reports: what fits is read in place, what does not is told before any change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.testing.asserts import assert_equal_states


def save(folder, **objects):
    with mp.Checkpointer(folder, **objects) as run:
        return run.save("a").wait()


def snapshot(*objects):
    """Copies of everything that a load could change."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in one.state_dict().items()}
        for one in objects
    ]


class Net(nn.Module):
    """Names, shapes and dtypes of every kind of difference."""

    def __init__(self, kind="stored"):
        super().__init__()
        self.same = nn.Linear(2, 2)
        self.shape = nn.Linear(2, 3 if kind == "stored" else 4, bias=False)
        dtype = torch.float32 if kind == "stored" else torch.float64
        self.register_buffer("kind", torch.ones(2, dtype=dtype))
        self.register_parameter(kind, nn.Parameter(torch.ones(1)))


def test_a_mismatch_is_one_report_and_changes_nothing(tmp_path):
    """Everything missing, unexpected, mis-shaped and mis-typed, and not only the first of it."""
    saved = save(tmp_path, model=Net(), extra=mp.Value(lambda: 1, lambda _: None))
    live = Net("live")
    optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
    before = snapshot(live)
    with pytest.raises(mp.MismatchError) as caught:
        mp.Checkpointer(tmp_path, model=live, optimizer=optimizer).open()
    report = caught.value.facts["report"]
    assert report.missing == ["optimizer", "model: live"]
    assert report.unexpected == ["model: stored"]
    assert report.mis_shaped == ["model: shape.weight (stored [3, 2], live [4, 2])"]
    assert report.mis_typed == ["model: kind (stored float32, live float64)"]
    assert not report.is_exact
    text = str(caught.value)
    for part in ("model: live", "model: stored", "[3, 2]", "float64", "Nothing was changed"):
        assert part in text
    assert_equal_states(snapshot(live), before)
    with pytest.raises(mp.MismatchError):
        saved.load_weights(live)
    assert_equal_states(snapshot(live), before)


def test_a_lenient_load_takes_what_fits_and_tells_the_rest(tmp_path):
    """Names and shapes that differ stay as they are; a dtype is converted and noted."""
    stored = Net()
    saved = save(tmp_path, model=stored)
    live = Net("live")
    shape = live.shape.weight.detach().clone()
    report = saved.load_weights(live, strict=False)
    assert torch.equal(live.same.weight, stored.same.weight)
    assert torch.equal(live.shape.weight, shape)
    assert (live.kind.dtype, live.kind.tolist()) == (torch.float64, [1.0, 1.0])
    assert report.cast == ["model: kind (stored float32, live float64)"]
    assert sorted(report.loaded) == ["model: kind", "model: same.bias", "model: same.weight"]
    assert report.missing == ["model: live"]
    assert "3 of 5 restored" in report.summary()
    live = Net("live")
    with mp.Checkpointer(tmp_path, strict=False, model=live) as run:
        assert run.load_report.missing == ["model: live"]
    assert torch.equal(live.same.weight, stored.same.weight)


def test_a_long_report_is_cut_and_says_so(tmp_path):
    """A thousand names help nobody."""
    saved = save(tmp_path, model=nn.ModuleList(nn.Linear(1, 1) for _ in range(30)))
    with pytest.raises(mp.MismatchError, match="and 52 more"):
        saved.load_weights(nn.Linear(2, 2))


class Hooked(nn.Module):
    """A model that loads in its own way: its names on disk are not those in memory."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.note = "new"

    def get_extra_state(self):
        return {"note": self.note, "count": (1, 2)}

    def set_extra_state(self, state):
        self.note, self.count = state["note"], state["count"]


def test_extra_state_of_modules_is_kept(tmp_path):
    """Modules may carry more than tensors."""
    model = Hooked()
    model.note = "trained"
    save(tmp_path, model=model)
    live = Hooked()
    with mp.Checkpointer(tmp_path, model=live):
        pass
    assert (live.note, live.count) == ("trained", (1, 2))
    assert torch.equal(live.inner.weight, model.inner.weight)


def test_load_hooks_are_called(tmp_path):
    """A module that translates its state as it is loaded must get the chance to."""
    model = nn.Linear(2, 2)
    saved = save(tmp_path, model=model)
    live = nn.Linear(2, 2)
    calls = []
    live.register_load_state_dict_pre_hook(lambda module, state, *_: calls.append(sorted(state)))
    saved.load_weights(live)
    assert calls == [["bias", "weight"]]
    assert torch.equal(live.weight, model.weight)


def test_buffers_count_and_those_that_do_not_persist_are_left_out(tmp_path):
    """The statistics of batch norm are state; a table that is computed anew is not."""

    def new():
        model = nn.BatchNorm1d(3)
        model.register_buffer("table", torch.arange(3), persistent=False)
        return model

    model = new()
    model(torch.randn(8, 3))
    stored = save(tmp_path, model=model).load()["state"]["model"]
    assert "table" not in stored
    assert stored["num_batches_tracked"].item() == 1
    live = new()
    with mp.Checkpointer(tmp_path, model=live):
        pass
    assert_equal_states(dict(live.state_dict()), dict(model.state_dict()))


def test_groups_restore_each_member_and_compare_their_names(tmp_path):
    """Two objects of one class in one group are told apart by the names they were given."""

    class Count:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    group = {"first": Count(1), "second": Count(2), "net": nn.Linear(1, 1)}
    save(tmp_path, callbacks=group)
    live = {"second": Count(0), "net": nn.Linear(1, 1), "first": Count(0)}
    with mp.Checkpointer(tmp_path, callbacks=live):
        pass
    assert (live["first"].value, live["second"].value) == (1, 2)
    assert torch.equal(live["net"].weight, group["net"].weight)
    other = {"first": Count(0), "third": Count(0), "net": nn.Linear(1, 1)}
    with pytest.raises(mp.MismatchError) as caught:
        mp.Checkpointer(tmp_path, callbacks=other).open()
    report = caught.value.facts["report"]
    assert report.missing == ["callbacks: third"]
    assert report.unexpected == ["callbacks: second"]
    assert other["first"].value == 0


def test_values_go_through_their_functions(tmp_path):
    """A plain number is state too, and a pair of functions is enough to reach it."""
    best = {"loss": 0.5, "at": (3, "ba")}
    save(
        tmp_path,
        loss=mp.Value(lambda: best["loss"], lambda value: best.update(loss=value)),
        at=(lambda: best["at"], lambda value: best.update(at=value)),
    )
    best.update(loss=9.0, at=None)
    with mp.Checkpointer(
        tmp_path,
        loss=mp.Value(lambda: best["loss"], lambda value: best.update(loss=value)),
        at=(lambda: best["at"], lambda value: best.update(at=value)),
    ):
        pass
    assert best == {"loss": 0.5, "at": (3, "ba")}


def test_names_are_checked_when_things_are_tracked(tmp_path):
    """A name that is taken, reserved or no file name fails at once."""
    run = mp.Checkpointer(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(mp.DuplicateNameError, match="model_2"):
        run.track(model=nn.Linear(1, 1))
    for name in ("rng", "gradients", "setup", "a/b", "", ".x", "a b", "x" * 65):
        with pytest.raises(mp.UsageError, match="cannot name"):
            run.track(**{name: nn.Linear(1, 1)})
    with pytest.raises(mp.UsageError, match="object"):
        run.track(thing=object())
    with pytest.raises(mp.DuplicateNameError):
        mp.Checkpointer(tmp_path, timer=nn.Linear(1, 1))
    with pytest.raises(mp.UsageError):
        run.track(text="abc")


def test_two_items_never_share_a_file(tmp_path):
    """The frozen part of one item is named after it, and must not meet an item of that name."""
    objects = {"model": nn.Linear(2, 2), "model-frozen": nn.Linear(3, 3)}
    with pytest.raises(mp.UsageError, match="model-frozen"):
        mp.Checkpointer(tmp_path, **objects)


class Versioned(nn.Module):
    """A class that has stored its weight the other way round in its first version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"].t().contiguous()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("save_format", ["milepost", "torch"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_class_is_told_the_version_of_what_it_is_given(
    tmp_path, monkeypatch, save_format, version
):
    """As torch does: else new weights would be taken for old ones and brought into a third form."""
    monkeypatch.setattr(Versioned, "_version", version)
    model = nn.ModuleDict({"a": Versioned(), "b": nn.BatchNorm1d(2), "c": Versioned()})
    saved = save(tmp_path, models={"one": model}, save_format=save_format)
    monkeypatch.undo()
    live = nn.ModuleDict({"a": Versioned(), "b": nn.BatchNorm1d(2), "c": Versioned()})
    with mp.Checkpointer(tmp_path, models={"one": live}, save_format=save_format):
        pass
    for key in "ac":
        stored = model[key].w if version == 2 else model[key].w.t()
        assert torch.equal(live[key].w, stored)
    assert saved.manifest.notes == ()


def test_weights_that_are_loaded_alone_come_with_their_versions(tmp_path):
    """From the record of how the objects were set up, which lies beside them."""
    model, live = Versioned(), Versioned()
    save(tmp_path, model=model).load_weights(live)
    assert torch.equal(live.w, model.w)


class OnePiece(nn.Module):
    """Shows itself as one piece, and of its parameters what is trained, as some libraries do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.inner[1].requires_grad_(False)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        own = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, one) for name, one in own if one.requires_grad)


def test_what_a_class_does_not_show_is_saved_as_its_state_dict_has_it(tmp_path):
    """By the tables of modules, and not by what ``named_modules`` and its like tell."""
    model, live = (nn.Sequential(OnePiece(), nn.Linear(2, 2)) for _ in range(2))
    saved = save(tmp_path, model=model)
    assert set(saved.load()["state"]["model"]) == set(model.state_dict())
    with mp.Checkpointer(tmp_path, model=live):
        pass
    assert_equal_states(snapshot(live), snapshot(model))


@pytest.mark.parametrize("numel", [3, 200_000])
def test_conjugated_and_negative_views_come_back(tmp_path, numel):
    """Which cannot be written to together with others."""

    def new():
        module = nn.Linear(2, 2)
        values = torch.randn(numel, dtype=torch.complex64)
        module.register_buffer("conj", values.conj())
        module.register_buffer("neg", values.conj().imag)
        return module

    model, live = new(), new()
    save(tmp_path, model=model)
    with mp.Checkpointer(tmp_path, model=live):
        pass
    for name in ("conj", "neg"):
        assert torch.equal(getattr(live, name), getattr(model, name))
        assert getattr(live, name).is_conj() == getattr(model, name).is_conj()


def test_a_model_without_memory_is_told_of(tmp_path):
    """Nothing would be read, and every tensor would be called restored."""
    saved = save(tmp_path, model=nn.Linear(2, 2))
    live = nn.Linear(2, 2, device="meta")
    with pytest.raises(mp.MismatchError, match="meta device"):
        saved.load_weights(live)
    saved.load_weights(live.to_empty(device="cpu"))
    assert torch.equal(live.weight, saved.load()["state"]["model"]["weight"])


def test_two_tensors_that_became_one_are_told_of(tmp_path):
    """One of two values is lost then."""
    stored = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    live = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    live["b"].weight = live["a"].weight
    saved = save(tmp_path, model=stored)
    report = saved.load_weights(live)
    assert [note for note in report.notes if "a.weight and b.weight are one tensor here" in note]
    assert torch.equal(live["a"].weight, stored["b"].weight)
    again = save(tmp_path / "tied", model=live)
    assert again.load_weights(live).notes == []


class Memory(nn.Module):
    """Has as many rows as it was given, and no fewer than what it loads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 2))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.rows = torch.empty_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_module_may_give_its_tensors_another_shape(tmp_path):
    """Observers of quantization do, memories, and modules that were never called."""
    model = nn.ModuleDict({"memory": Memory(), "lazy": nn.LazyLinear(3), "plain": nn.Linear(2, 2)})
    model["memory"].rows = torch.randn(5, 2)
    model["lazy"](torch.randn(1, 4))
    save(tmp_path, model=model)
    live = nn.ModuleDict({"memory": Memory(), "lazy": nn.LazyLinear(3), "plain": nn.Linear(2, 2)})
    with mp.Checkpointer(tmp_path, model=live):
        pass
    assert_equal_states(snapshot(live), snapshot(model))
    narrow = nn.ModuleDict({"memory": Memory(), "lazy": nn.LazyLinear(3), "plain": nn.Linear(2, 1)})
    with pytest.raises(mp.MismatchError, match=r"plain.weight \(stored \[2, 2\], live \[1, 2\]\)"):
        mp.Checkpointer(tmp_path, model=narrow).open()


def test_weights_are_loaded_from_a_member_of_a_group_and_from_nothing_else(tmp_path):
    """By the name that reports use; a name that is not there is told with those that are."""
    nets = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    saved, live = save(tmp_path, nets=nets), nn.Linear(2, 2)
    saved.load_weights(live, item="nets/two")
    assert_equal_states(snapshot(live), snapshot(nets["two"]))
    for item in ("model", "nets/three", "two"):
        with pytest.raises(mp.MissingError, match=f"holds no item '{item}'") as caught:
            saved.load_weights(live, item=item)
        assert "'nets'" in str(caught.value)
