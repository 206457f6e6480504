"""Models of which each rank holds some layers only: one model to whoever reads it."""

from __future__ import annotations

import hashlib
import textwrap
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.testing.ranks import run_ranks

BUILD = """
    import hashlib
    import milepost as mp
    from torch import nn

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4)
            self.layers = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in range(4)})
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.layers["1"].bias.requires_grad_(False)

    def cut(layers, *, first=False, last=False):
        whole = Whole()
        for n in range(4):
            if n not in layers:
                del whole.layers[str(n)]
        if not first:
            del whole.embed
        if not last:
            del whole.head, whole.norm
        return whole

    def digest(tensor):
        return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()

    def optimizer_of(*modules):
        named = [item for module in modules for item in module.named_parameters()]
        wide = [p for name, p in named if p.dim() > 1]
        narrow = [p for name, p in named if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": wide, "lr": 0.1}, {"params": narrow, "lr": 0.2, "weight_decay": 0.0}]
        )

    def train(*modules, optimizer):
        for module in modules:
            for name, p in module.named_parameters():
                if p.requires_grad:
                    label = name.replace("head", "embed")
                    p.grad = torch.full_like(p, float(sum(map(ord, label)) % 7 + 1)) * p
            if hasattr(module, "norm"):
                module.norm(torch.arange(8.0).reshape(2, 4))
        optimizer.step()
        optimizer.zero_grad()

    def state_of(*modules, optimizer):
        found = {}
        for module in modules:
            found.update({name: digest(value) for name, value in module.state_dict().items()})
            for name, p in module.named_parameters():
                state = optimizer.state.get(p, {})
                found.update({f"{name}/{key}": digest(v) for key, v in state.items()})
        return found
"""


def whole() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    space: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(BUILD), space)
    model = space["Whole"]()
    optimizer = space["optimizer_of"](model)
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()

    found = {name: digest(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.update({f"{name}/{key}": digest(v) for key, v in optimizer.state.get(p, {}).items()})
    return found


def test_a_split_model_is_one_model_and_goes_on_in_any_other_split(tmp_path: Path) -> None:
    """Two stages, one process, then four stages on three ranks, one of which has two."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    body = f"""
    module = cut([0, 1], first=True) if rank == 0 else cut([2, 3], last=True)
    optimizer = optimizer_of(module)
    with mp.Checkpointer({a!r}, model=mp.Stage(module), optimizer=optimizer) as run:
        for _ in range(2):
            train(module, optimizer=optimizer)
            run.step(num_samples=2)
        run.save(wait=True)
    before = state_of(module, optimizer=optimizer)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    again = optimizer_of(module)
    with mp.Checkpointer({a!r}, model=mp.Stage(module), optimizer=again, resume="must") as run:
        report = run.load_report
        give(before=before, after=state_of(module, optimizer=again), loaded=report.is_exact)
        whole_options = {{"model": mp.Stage(module), "sharding": "consolidated"}}
        with mp.Checkpointer({a!r} + "-whole", **whole_options) as other:
            other.save("whole", wait=True)
        with mp.Checkpointer({a!r} + "-torch", save_format="torch", model=mp.Stage(module)) as file:
            file.save("whole", wait=True)
        module.layers["9"] = nn.Linear(4, 4)
        said = ""
        try:
            run.restore()
        except mp.MismatchError as error:
            said = str(error)
        give(said=said)
    """
    two = run_ranks(BUILD + body, 2)
    saved: dict[str, str] = {}
    for one in two:
        assert one["after"] == one["before"]
        assert one["loaded"]
        assert "layers.9.weight" in one["said"]
        assert "unexpected" not in one["said"]
        assert not set(one["before"]) <= set(saved)
        saved |= one["before"]

    checkpoint = mp.open_run(a).get("ba2")
    stored = checkpoint.load(["model"])["state"]["model"]
    for kind in ("whole", "torch"):
        one = mp.open_run(f"{a}-{kind}").get("whole").load(["model"])["state"]["model"]
        assert_equal_states(one, stored)
    assert checkpoint.verify(level="full").is_good
    model, optimizer = whole()
    with mp.Checkpointer(b, model=model, optimizer=optimizer) as run:
        report = run.restore(checkpoint)
        assert report.is_exact
        found = state_of(model, optimizer)
        # On the last stage the tied weight is called as there.
        tied = {name.replace("head", "embed"): value for name, value in saved.items()}
        assert found == saved | tied
        run.save("whole", wait=True)

    body = f"""
    if rank == 0:
        modules = [cut([0], first=True), cut([2])]
    else:
        modules = [cut([1])] if rank == 1 else [cut([3], last=True)]
    with torch.no_grad():
        for module in modules:
            for p in module.parameters():
                p.fill_(7)
    optimizer = optimizer_of(*modules)
    with mp.Checkpointer({b!r}, resume="must", strict=True) as run:
        run.track(model=mp.Stage(*modules))
        run.track(optimizer=optimizer)
        give(state=state_of(*modules, optimizer=optimizer))
        run.save("three", wait=True)
    """
    together: dict[str, str] = {}
    for one in run_ranks(BUILD + body, 3):
        together |= one["state"]
    assert together == found
    weights = mp.open_run(b).get("three").load(["model"])["state"]["model"]
    assert {name: value.shape for name, value in weights.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert sum(one.size_bytes for one in mp.open_run(b).get("three").manifest.files) > 0
    model, optimizer = whole()
    assert mp.open_run(b).get("three").load_weights(model, strict=True).is_exact


def test_stages_that_are_sharded_and_tied_to_each_other_are_one_model(tmp_path: Path) -> None:
    """Two stages on two ranks each; the last one has the embedding too, under both of its names."""
    body = f"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    is_first = mesh["pp"].get_local_rank() == 0
    module = cut([0, 1], first=True) if is_first else cut([2, 3], last=True)
    if not is_first:
        module.embed = nn.Embedding(5, 4)
        module.embed.weight = module.head.weight
    for p in module.parameters():
        p.requires_grad_(True)
    fully_shard(module, mesh=mesh["dp"])
    optimizer = optimizer_of(module)
    with mp.Checkpointer({str(tmp_path)!r}, model=mp.Stage(module), optimizer=optimizer) as run:
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        run.save("x", wait=True)
    before = [p.to_local().detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.to_local().detach().zero_()
    again = optimizer_of(module)
    with mp.Checkpointer({str(tmp_path)!r}, model=mp.Stage(module), optimizer=again) as run:
        after = [p.to_local().detach() for p in module.parameters()]
        give(
            same=all(map(torch.equal, before, after)),
            moments=all(
                torch.equal(value.to_local(), optimizer.state[p][key].to_local())
                for p, state in again.state.items()
                for key, value in state.items() if key != "step"
            ),
        )
    """
    leave = "    dist.destroy_process_group()\n    sys.stdout.flush()\n    os._exit(0)\n"
    given = run_ranks(BUILD + body + leave, 4)
    assert given == [{"same": True, "moments": True}] * 4
    model, optimizer = whole()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers["1"].bias.requires_grad_(True)
    checkpoint = mp.open_run(tmp_path).get("x")
    with mp.Checkpointer(str(tmp_path / "one"), model=model, optimizer=optimizer) as run:
        assert run.restore(checkpoint).is_exact
    # The first step of Adam is one learning rate; of matrices that and a decay.
    for name, p in model.named_parameters():
        rate, decay = (0.1, 0.01) if p.dim() > 1 else (0.2, 0.0)
        torch.testing.assert_close(p, expected[name] * (1 - rate * decay) - rate)
        assert optimizer.state[p]["step"] == 1.0


def test_ranks_that_change_what_they_hold_lose_nothing_unseen(tmp_path: Path) -> None:
    """Who writes what follows from what was told at the start: the leader looks at the outcome."""
    body = f"""
    def attempt(work):
        try:
            work()
        except mp.CheckpointError as error:
            return [type(error).__name__, str(error)]
        return "ok"

    torch.manual_seed(0)
    shared = nn.ModuleDict({{name: nn.Linear(40, 40) for name in "abcd"}})
    stage = nn.ModuleDict({{**shared, f"own{{rank}}": nn.Linear(2, 2)}})
    said = []
    with mp.Checkpointer({str(tmp_path / "a")!r}, model=mp.Stage(stage)) as run:
        said.append(attempt(lambda: run.save("whole", wait=True)))
        stage[f"new{{rank}}"] = nn.Linear(3, 3)
        said.append(attempt(lambda: run.save("more", wait=True)))
        if rank == 1:
            for name in "abcd":
                del stage[name]
        said.append(attempt(lambda: run.save("less", wait=True)))
        if rank == 1:
            stage.update(shared)
        said.append(attempt(lambda: run.save("again", wait=True)))
        stage.train(rank == 0)
        said.append(attempt(lambda: run.save("modes", wait=True)))
    model = mp.Stage(stage) if rank else stage
    run = mp.Checkpointer({str(tmp_path / "b")!r}, model=model)
    said.append(attempt(run.open))
    give(said=said)
    """
    zero, one = (given["said"] for given in run_ranks(BUILD + body, 2))
    assert [said == "ok" for said in zero] == [True, True, False, True, False, False]
    for number in (2, 4, 5):
        assert zero[number] == one[number]
        assert zero[number][0] == "MismatchError"
    assert "do not all have model/a.bias" in zero[2][1]
    assert "setup/models/model/is_training" in zero[4][1]
    assert "do not mean the same by model" in one[5][1]
    run = mp.open_run(tmp_path / "a")
    assert [found.name for found in run.checkpoints()] == ["whole", "more", "again"]
    names = set(run.get("more").load(["model"])["state"]["model"])
    assert {"new0.weight", "new1.weight", "own0.bias", "own1.bias", "a.weight"} <= names
    assert mp.open_run(tmp_path / "a").get("again").verify(level="full").is_good
    assert not (tmp_path / "a" / "less").exists()
