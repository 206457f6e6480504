"""What needs a process of its own: the first save of a process, its memory, its longest pause.

A child builds a state, does one thing and prints what it found as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import Figures
from torch import Tensor, nn
from torch.utils.data import DataLoader

from milepost.stores.pages import advise, page_memory

__all__ = ["first_save", "frozen_bytes", "longest_gap", "memory", "memory_within_budget"]

_TIMEOUT_S = 900
_GIB = 1024**3


def first_save(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure how long the first save of a process blocks, in the first batch and in the fifth.

    Whether it blocks for longer than later ones depends on how fast the machine gets memory: a
    batch takes a second, and what can be had in it is measured in a process of its own.
    """
    figures, num_bytes = Figures(), int(0.8e9)
    for _ in range(rounds):
        found: dict[str, float] = {}
        for name in ("_fresh_memory", "_save_in_first", "_save_in_fifth"):
            found.update(_in_child(folder, name, num_bytes))
        figures.add_round(found)
    return figures, num_bytes


def memory(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure how much memory saving takes beside the state."""
    return _in_children(folder, rounds, "_memory", num_bytes=int(0.8e9))


def memory_within_budget(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure the memory and the time of saves of 4 GiB with a budget of 1 GiB."""
    return _in_children(folder, rounds, "_within_budget", num_bytes=4 * _GIB)


def longest_gap(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure for how long a main thread is kept from running while a save is written."""
    return _in_children(folder, rounds, "_longest_gap", num_bytes=int(0.8e9))


def frozen_bytes(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure what a second save writes of a state of which nine tenths are frozen."""
    return _in_children(folder, rounds, "_frozen_bytes", num_bytes=int(0.4e9))


def _in_children(folder: Path, rounds: int, name: str, *, num_bytes: int) -> tuple[Figures, int]:
    figures = Figures()
    for _ in range(rounds):
        figures.add_round(_in_child(folder, name, num_bytes))
    return figures, num_bytes


def _in_child(folder: Path, name: str, num_bytes: int) -> dict[str, float]:
    place = Path(tempfile.mkdtemp(dir=folder))
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, name, str(place), str(num_bytes)],
        check=True,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
    )
    shutil.rmtree(place)
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


# The children.


class _Weights(nn.Module):
    """Parameters of a given size, most of them large; some may be frozen."""

    def __init__(self, num_bytes: int, *, frozen_share: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 2048
        count = num_bytes // (4 * width * width)
        for index in range(count):
            weight = nn.Parameter(torch.randn(width, width) * 0.02)
            weight.requires_grad_(index >= frozen_share * count)
            self.register_parameter(f"weight{index}", weight)


def _run(folder: Path, model: nn.Module, **options: Any) -> Any:
    from milepost import Checkpointer

    return Checkpointer(folder / "run", model=model, handle_signals=False, **options)


def _fresh_memory(_: Path, num_bytes: int) -> dict[str, float]:
    """Measure how long it takes to get memory of the size of the state, and nothing else."""
    start = time.perf_counter()
    memory = page_memory(num_bytes)
    advise(memory, mmap.MADV_HUGEPAGE)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        memory[at] = 1
    return {"fresh memory": time.perf_counter() - start}


def _save_in_first(folder: Path, num_bytes: int) -> dict[str, float]:
    seconds = _saves_from(1, folder, num_bytes)
    return {"first": seconds[0], "later": sorted(seconds[1:])[len(seconds[1:]) // 2]}


def _save_in_fifth(folder: Path, num_bytes: int) -> dict[str, float]:
    return {"fifth": _saves_from(5, folder, num_bytes)[0]}


def _saves_from(first: int, folder: Path, num_bytes: int) -> list[float]:
    """Return how long saves block in a loop that saves in each batch from one on."""
    model = _Weights(num_bytes // 3)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with _run(folder, model, optimizer=optimizer) as run:
        for _ in run.batches(DataLoader(list(range(8)))):
            time.sleep(1.0)  # a batch of training, that needs neither core
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            optimizer.zero_grad()
            if run.timer.batch + 1 < first:
                continue
            start = time.perf_counter()
            pending = run.save(f"save{run.timer.batch}")
            found.append(time.perf_counter() - start)
            pending.wait()
    return found


def _peak_beside(call: Callable[[], Any]) -> float:
    """Return how far the memory of this process grew while something ran, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _memory(folder: Path, num_bytes: int) -> dict[str, float]:
    model = _Weights(num_bytes)

    def save() -> None:
        with _run(folder, model) as run:
            for index in range(3):
                run.save(f"save{index}", wait=True)

    return {"extra": _peak_beside(save) / num_bytes}


def _within_budget(folder: Path, num_bytes: int) -> dict[str, float]:
    model = _Weights(num_bytes)
    figures: dict[str, float] = {}
    for name, options in (("budget", {"staging_budget_bytes": _GIB}), ("whole", {})):
        seconds: list[float] = []

        def save(options: dict[str, Any] = options, seconds: list[float] = seconds) -> None:
            with _run(folder, model, **options) as run:
                for index in range(3):
                    start = time.perf_counter()
                    run.save(f"save{index}", wait=True)
                    seconds.append(time.perf_counter() - start)

        figures[f"{name} extra"] = _peak_beside(save) / (_GIB if options else num_bytes)
        figures[name] = min(seconds[1:])
        shutil.rmtree(folder / "run")
    return figures


def _longest_gap(folder: Path, num_bytes: int) -> dict[str, float]:
    model = _Weights(num_bytes)

    def spin(is_over: Callable[[], bool]) -> float:
        longest, last = 0.0, time.perf_counter()
        while not is_over():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest

    figures: dict[str, float] = {}
    with _run(folder, model) as run:
        run.save("warm", wait=True)
        start = time.perf_counter()
        pending = run.save("measured")
        figures["milepost"] = spin(pending.done)
        seconds = time.perf_counter() - start
        end = time.perf_counter() + seconds
        figures["nothing"] = spin(lambda: time.perf_counter() > end)
    state = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def write() -> None:
        with (folder / "peer.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    writer = threading.Thread(target=write)
    writer.start()
    figures["torch.save in a thread"] = spin(lambda: not writer.is_alive())
    writer.join()
    return figures


def _frozen_bytes(folder: Path, num_bytes: int) -> dict[str, float]:
    model = _Weights(num_bytes, frozen_share=0.9)
    trained: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
    with _run(folder, model) as run:
        first = run.save("first").wait()
        for weight in trained:
            weight.data.add_(1.0)
        second = run.save("second").wait()
    sizes = []
    for name in (first.name, second.name):
        files = [path.stat() for path in (folder / "run" / name).rglob("*") if path.is_file()]
        sizes.append(sum(one.st_size for one in files))
        own = sum(one.st_size for one in files if one.st_nlink == 1)
    return {"written": own / sizes[1]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
