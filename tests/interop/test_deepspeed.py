"""DeepSpeed's ZeRO: saved by parameter, so that any stage and no stage at all can go on from it."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.testing.asserts import assert_equal_states
from milepost.testing.ranks import run_ranks

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
    ),
]

ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

BUILD = """
    import warnings
    warnings.simplefilter("ignore")
    import deepspeed
    import milepost as mp
    from milepost.integrations.deepspeed import tracked
    from torch import nn

    def net():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.Linear(5, 2)
        )
        model[3].bias.requires_grad_(False)
        return model

    def groups_of(model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for n, p in named if "weight" in n], "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "lr": 0.02},
        ]

    def build(stage, *, kind="bf16", whole_below=0, accumulate=1):
        model = net()
        zero = {
            "stage": stage,
            "stage3_param_persistence_threshold": whole_below,
            "sub_group_size": 50,
        }
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        }
        if kind != "fp32":
            config[kind] = {"enabled": True}
        optimizer = torch.optim.AdamW(groups_of(model))
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        return engine

    def step(engine, seed):
        torch.manual_seed(seed)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(torch.randn(4, 6).to(dtype)).float().sum()
        engine.backward(loss)
        engine.step()
        return loss.item()

    def train(folder, stage, first, last, **options):
        engine, losses = build(stage, **options), []
        with mp.Checkpointer(folder, **tracked(engine)) as run:
            for number in range(first, last):
                losses.append(step(engine, number))
                run.step(num_samples=4)
            run.save(f"zero{stage}-{last}", wait=True)
        return losses
"""


def state(folder: str, name: str) -> Any:
    found = mp.open_run(folder).get(name).load(["model", "optimizer"])["state"]
    for group in found["optimizer"]["param_groups"]:
        group["params"].sort()
    return found


def test_zero_of_any_stage_goes_on_exactly_and_as_any_other(tmp_path: Path) -> None:
    """With float32 weights and moments, on other ranks, as a plain model, and back again."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    body = f"""
    given = {{}}
    for stage in (1, 2, 3):
        straight = train({a!r} + str(stage), stage, 0, 4)
        split = train({b!r} + str(stage), stage, 0, 2) + train({b!r} + str(stage), stage, 2, 4)
        given[stage] = [straight, split]
    # Whole weights in float32; small ones kept whole in stage 3; and from stage to stage.
    given["fp32"] = [train({a!r} + "f", 1, 0, 2, kind="fp32"), []]
    given["whole"] = [train({b!r} + "1", 3, 4, 6, whole_below=10**6), []]
    given["other"] = [train({a!r} + "1", 1, 4, 6), []]
    train({b!r} + "2", 3, 4, 4)
    train({b!r} + "3", 1, 4, 4)

    said = {{}}
    try:
        tracked(build(0))
    except mp.UnsupportedStateError as error:
        said["stage"] = str(error)
    engine = build(1, accumulate=2)
    with mp.Checkpointer({c!r} + "x", **tracked(engine)) as run:
        step(engine, 0)
        try:
            run.save("between")
        except mp.UnsupportedStateError as error:
            said["between"] = str(error)
        step(engine, 1)
        run.save("after", wait=True)
    give(losses=given, said=said)
    """
    two = run_ranks(BUILD + body, 2, env=ENV, timeout_s=280)
    for one in two:
        for stage in "123":
            straight, split = one["losses"][stage]
            assert split == straight
        assert one["losses"]["whole"][0] == pytest.approx(one["losses"]["other"][0], abs=0.01)
        assert "not of ZeRO" in one["said"]["stage"]
        assert "1 of 2 gradients" in one["said"]["between"]
    for stage in (1, 2, 3):
        name = f"zero{stage}-4"
        assert_equal_states(state(b + str(stage), name), state(a + str(stage), name))
        assert mp.open_run(b + str(stage)).get(name).verify(level="full").is_good
    saved = state(b + "2", "zero2-4")
    assert_equal_states(state(b + "2", "zero3-4"), saved)
    assert_equal_states(state(b + "3", "zero1-4"), state(b + "3", "zero3-4"))
    trained = [name for name in saved["model"] if name != "3.bias"]
    assert {saved["model"][name].dtype for name in trained} == {torch.float32}
    assert saved["model"]["3.bias"].dtype is torch.bfloat16  # nothing but that is known of it

    # A plain model in float32.
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    source = BUILD[BUILD.index("    def net()") : BUILD.index("    def build(")]
    exec(textwrap.dedent(source), space)
    model = space["net"]()
    model[3].bias.data = model[3].bias.data.bfloat16()
    optimizer = torch.optim.AdamW(space["groups_of"](model), lr=7.0)
    with mp.Checkpointer(c, model=model, optimizer=optimizer) as run:
        run.restore(b + "2/zero2-4", items=["model", "optimizer"])
        run.save("plain", wait=True)
    assert_equal_states(state(c, "plain"), saved)

    body = f"""
    for stage in (1, 3):
        engine = build(stage)
        with mp.Checkpointer({c!r} + str(stage), **tracked(engine)) as run:
            run.restore({c!r} + "/plain", items=["model", "optimizer"])
            run.save("three", wait=True)
            step(engine, 0)
        engine = build(stage)
        with mp.Checkpointer({c!r} + str(stage) + "b", **tracked(engine)) as run:
            run.restore({b!r} + "2/zero2-4")
            give(**{{f"steps{{stage}}": engine.global_steps}})
    """
    for one in run_ranks(BUILD + body, 3, env=ENV, timeout_s=280):
        assert one == {"steps1": 4, "steps3": 4}
    for stage in (1, 3):
        assert_equal_states(state(c + str(stage), "three"), saved)
