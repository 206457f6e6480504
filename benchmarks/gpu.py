"""Check and measure saves of a state that lies on a CUDA device; no part of ``make bench``.

    python benchmarks/gpu.py [--folder DIR] [--json FILE] [--parameters N] [--seconds S]

1. A save that is asked for while a long optimizer step is under way holds what that step leaves,
   byte for byte, whatever the training does next.
2. How fast the state comes to the host, against what the bus can do to pinned memory.
3. How long a save blocks, until when it is durable, and what steps cost meanwhile: copied at once,
   with ``staging="overlap"``, and by ``dcp.async_save`` with pinned staging.
4. A load back into the device, bit for bit.

The state is that of a model in bfloat16 whose moments are float32: 10 bytes a parameter. The folder
must have room for three of it, the device for three, and the host for two. With ``--device cpu``
the same is done without a device, for a look whether this script works.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import table
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import milepost
from milepost import Checkpointer

_WIDEST = 4096
_LEAST_LAYERS = 4
_USUAL_STEPS = 5
_SLEEP_CYCLES = 400_000_000
"""How long the device is kept busy before the step of the first check: some tenths of a second."""
_PROBE_BYTES = 2**30


class Adam32(torch.optim.Optimizer):
    """Adam with moments in float32, whatever the weights are."""

    def __init__(self, parameters: Any, lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as torch calls it
        """Change the weights."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                kept = self.state[weight]
                if not kept:
                    kept["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
                    kept["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
                gradient = weight.grad.float()
                kept["exp_avg"].lerp_(gradient, 1 - beta1)
                kept["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                change = kept["exp_avg"] / (kept["exp_avg_sq"].sqrt() + group["eps"])
                weight.add_(change.to(weight.dtype), alpha=-group["lr"])


class Loop:
    """A deep model that learns noise.

    Args:
        device: Where it lies.
        num_parameters: About how many it has.
    """

    def __init__(self, device: torch.device, num_parameters: int) -> None:
        torch.manual_seed(0)
        width = _WIDEST
        while num_parameters // (width * width) < _LEAST_LAYERS and width > 16:
            width //= 2
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        layers = max(1, num_parameters // (width * width))
        self.device = device
        self.model = nn.ModuleList(
            nn.Linear(width, width, bias=False, **options) for _ in range(layers)
        )
        self.optimizer = Adam32(self.model.parameters())
        num_samples = width if device.type == "cuda" else 8  # the host is slow at bfloat16
        self.inputs = torch.randn(num_samples, width, **options)

    def step(self, before_change: Callable[[], None] = lambda: None) -> float:
        """Train one batch to its end; return the seconds."""
        start = time.perf_counter()
        values = self.inputs
        for layer in self.model:
            values = values + torch.tanh(layer(values)) / 8
        self.optimizer.zero_grad(set_to_none=True)
        values.float().square().mean().backward()
        before_change()
        self.optimizer.step()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the live tensors: weights and moments."""
        found: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[f"model.{name}"] = weight.data
            for moment, value in self.optimizer.state[weight].items():
                found[f"optimizer.{name}.{moment}"] = value
        return found

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all of it."""
        return sum(one.nbytes for one in self.state.values())


def _run(folder: Path, loop: Loop, **options: Any) -> Checkpointer:
    return Checkpointer(
        folder, model=loop.model, optimizer=loop.optimizer, handle_signals=False, **options
    )


def _clones(loop: Loop) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loop.state.items()}


def _is_same(loop: Loop, wanted: dict[str, Tensor]) -> bool:
    """Return whether the live state has the very bytes of another one."""
    return all(
        torch.equal(live.view(torch.uint8), wanted[name].view(torch.uint8))
        for name, live in loop.state.items()
    )


def check_producer(folder: Path, loop: Loop) -> dict[str, Any]:
    """Save while a step is under way, train on at once, and compare what was saved."""
    is_cuda = loop.device.type == "cuda"
    loop.step()  # which leaves gradients
    with _run(folder, loop) as run:
        _clones(loop)  # their memory is kept, so that getting it holds up nothing later
        if is_cuda:
            torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - the one way to be sure
        loop.optimizer.step()
        if is_cuda:
            ended = torch.cuda.Event()
            ended.record()
        wanted = _clones(loop)  # in the order of the stream, and so what the step leaves
        is_under_way = is_cuda and not ended.query()
        pending = run.save("check")
        for _ in range(2):
            loop.step()
        pending.wait()
        is_changed = not _is_same(loop, wanted)
        run.restore("check")
    found = {"saved what the step left": _is_same(loop, wanted) and is_changed}
    if is_cuda:
        found["and was asked for before it ended"] = is_under_way
    return found


def measure_bus(loop: Loop) -> float:
    """Return how many bytes a second reach memory of the host that is pinned and warm."""
    is_cuda = loop.device.type == "cuda"
    num_bytes = min(_PROBE_BYTES, max(loop.num_bytes, 1))
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=loop.device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    seconds = []
    for _ in range(5):
        loop.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        loop.synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / statistics.median(seconds[1:])


class Saver(NamedTuple):
    """One way to save while training.

    Attributes:
        save: Begins a save of that number.
        before_change: Called before the optimizer changes the state.
        wait: Waits until the save is durable.
        close: Ends it.
        facts: Returns what a save says of itself.
    """

    save: Callable[[int], None]
    before_change: Callable[[], None]
    wait: Callable[[], None]
    close: Callable[[], None]
    facts: Callable[[], dict[str, Any]]


def _milepost(folder: Path, loop: Loop, staging: Any) -> Saver:
    run = _run(folder, loop, staging=staging, keep=milepost.KeepLast(1))
    run.open()

    def facts() -> dict[str, Any]:
        stats = run.last_save.stats
        names = ("state_bytes", "stage_s", "late_bytes", "eager_reason", "written_bytes", "write_s")
        return {name: stats[name] for name in names if name in stats}

    return Saver(
        save=lambda number: run.save(f"save{number}") and None,
        before_change=lambda: None,
        wait=lambda: run.last_save.wait() and None,
        close=run.close,
        facts=facts,
    )


def _dcp(folder: Path, loop: Loop) -> Saver:
    is_cuda = loop.device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=is_cuda,
        use_shared_memory=False,
        use_async_staging=is_cuda,
        use_non_blocking_copy=is_cuda,
    )
    stager = DefaultStager(options)
    answers: list[Any] = []

    def save(number: int) -> None:
        shutil.rmtree(folder / f"save{number - 1}", ignore_errors=True)
        writer = FileSystemWriter(folder / f"save{number}", sync_files=True)
        answers[:] = [dcp.async_save(loop.state, storage_writer=writer, async_stager=stager)]

    def before_change() -> None:
        for one in answers:
            if hasattr(one, "staging_completion"):
                one.staging_completion.result()

    def wait() -> None:
        for one in answers:
            getattr(one, "upload_completion", one).result()

    return Saver(save, before_change, wait, stager.close, dict)


def measure_saver(loop: Loop, saver: Saver, *, rounds: int, until_s: float) -> dict[str, Any]:
    """Save while training, and compare the steps meanwhile with those before.

    Args:
        loop: The training.
        saver: How to save.
        rounds: How often, if there is time.
        until_s: When no other round begins, by ``time.perf_counter``.

    Returns:
        The first save by itself, and medians of the others.
    """
    found: list[dict[str, Any]] = []
    try:
        for number in range(rounds + 1):
            if len(found) > 1 and time.perf_counter() > until_s:
                break
            usual_s = statistics.median(loop.step() for _ in range(_USUAL_STEPS))
            found.append({"step_s": usual_s, **_save_once(loop, saver, number)})
    finally:
        saver.close()
    first, *later = found
    names = ("step_s", "blocking_s", "durable_s", "first_step", "steps_meanwhile")
    medians = {name: statistics.median(one[name] for one in later) for name in names}
    return {**medians, "first_blocking_s": first["blocking_s"], "facts": later[-1]["facts"]}


def _save_once(loop: Loop, saver: Saver, number: int) -> dict[str, Any]:
    usual_s = loop.step()
    start = time.perf_counter()
    saver.save(number)
    blocking_s = time.perf_counter() - start
    is_done, steps = _watch(saver.wait), []
    while not is_done() or not steps:
        steps.append(loop.step(saver.before_change))
    durable_s = is_done() - start
    return {
        "blocking_s": blocking_s,
        "durable_s": durable_s,
        "first_step": steps[0] / usual_s,
        "steps_meanwhile": statistics.median(steps) / usual_s,
        "facts": saver.facts(),
    }


def _watch(wait: Callable[[], None]) -> Callable[[], float]:
    """Wait in a thread; return what tells when that ended, 0 until it did."""
    ended: list[float] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        ended.append(time.perf_counter())

    threading.Thread(target=run).start()

    def look() -> float:
        if errors:
            raise errors[0]
        return ended[0] if ended else 0.0

    return look


def check_load(folder: Path, loop: Loop) -> dict[str, Any]:
    """Save, change everything, load, and compare every bit."""
    with _run(folder, loop) as run:
        run.save("whole", wait=True)
        wanted = _clones(loop)
        for value in loop.state.values():
            value.zero_()
        loop.synchronize()
        start = time.perf_counter()
        run.restore("whole")
        loop.synchronize()
        seconds = time.perf_counter() - start
    return {"load_s": seconds, "loaded bit for bit": _is_same(loop, wanted)}


def measure(device: torch.device, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure everything; return what was found."""
    until_s = time.perf_counter() + options.seconds
    loop = Loop(device, options.parameters)
    for _ in range(3):
        loop.step()
    found: dict[str, Any] = {"state_bytes": loop.num_bytes}
    place = _new(folder, "check")
    found |= check_producer(place, loop)
    shutil.rmtree(place)
    bus = found["bus bytes/s"] = measure_bus(loop)
    savers: dict[str, Callable[[Path], Saver]] = {
        "milepost, eager": lambda place: _milepost(place, loop, "eager"),
        "milepost, overlap": lambda place: _milepost(place, loop, "overlap"),
        "dcp.async_save": lambda place: _dcp(place, loop),
    }
    measured: dict[str, Any] = {}
    for number, (name, make) in enumerate(savers.items()):
        place = _new(folder, f"saver{number}")
        share_s = (until_s - time.perf_counter()) / (len(savers) - number + 1)
        measured[name] = measure_saver(
            loop, make(place), rounds=options.rounds, until_s=time.perf_counter() + share_s
        )
        shutil.rmtree(place)
    found["savers"] = measured
    facts = measured["milepost, eager"]["facts"]
    found["copied bytes/s"] = facts["state_bytes"] / facts["stage_s"]
    found["copied / bus"] = found["copied bytes/s"] / bus
    return found | check_load(_new(folder, "load"), loop)


def _new(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    rows = []
    for name, one in found["savers"].items():
        seconds = (one["blocking_s"], one["first_blocking_s"], one["durable_s"])
        ratios = (one["first_step"], one["steps_meanwhile"])
        reason = one["facts"].get("eager_reason", "")
        rows.append([name, *(f"{x:.3f}" for x in seconds), *(f"{x:.2f}" for x in ratios), reason])
    columns = ["variant", "blocks s", "first s", "durable s", "first step", "steps", "at once for"]
    table(f"A save in a training, {found['state_bytes'] / 1e9:.2f} GB", columns, rows)
    rates = {
        "bus, to pinned memory, GB/s": found["bus bytes/s"] / 1e9,
        "copy of a save, GB/s": found["copied bytes/s"] / 1e9,
        "copy / bus": found["copied / bus"],
        "load into the device, s": found["load_s"],
    }
    table("Rates", ["what", "figure"], [[name, f"{x:.3f}"] for name, x in rates.items()])
    checks = [[name, "yes" if one else "NO"] for name, one in found.items() if one is bool(one)]
    table("Checks", ["what", "holds"], checks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parameters", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="after a first one that is dropped")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="when no round begins any more"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to use")
    parser.add_argument("--json", type=Path, help="write everything that was found here")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here. --device cpu only shows that this script works.")
    device = torch.device(options.device)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"{kind}, torch {torch.__version__}, milepost {milepost.__version__}")
    has_group = not dist.is_initialized()
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="milepost-gpu-", dir=options.folder))
    try:
        found = measure(device, folder, options)
    finally:
        shutil.rmtree(folder)
        if has_group:
            dist.destroy_process_group()
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    if not all(one for one in found.values() if one is bool(one)):
        sys.exit("A check has failed.")


if __name__ == "__main__":
    main()
