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
import limits
import ranks
import reporting
import safetensors
import torch
from claims import Figures

import milepost


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def ratios(figures: Figures, limit: str, names: list[str], *, is_rate: bool) -> list[list[str]]:
    """Return a row a variant: median seconds, spread, ratio to the limit."""
    rows = []
    base = figures.median(limit)
    for name in [limit, *names]:
        median, (low, high) = figures.median(name), figures.spread(name)
        ratio = base / median if is_rate else median / base
        rows.append([name, f"{median:.3f}", f"{low:.3f}-{high:.3f}", f"{ratio:.2f}"])
    return rows


COLUMNS = ["variant", "median s", "spread s", "ratio"]
Claim = Callable[..., tuple[Figures, int]]
Measure = Callable[[str, Claim], tuple[Figures, int]]


def measure_saves(measure: Measure) -> None:
    """Measure saves of a large state."""
    figures, size = measure("save", claims.blocking_and_durable)
    rows = ratios(figures, "copy", ["milepost blocking"], is_rate=False)
    table(f"Blocking time of an async save, {size / 1e9:.2f} GB, times a warm copy", COLUMNS, rows)
    names = ["milepost", "safetensors", "torch.save", "dcp.save"]
    rows = ratios(figures, "write limit", names, is_rate=True)
    table("Durable save, share of the direct write rate", COLUMNS, rows)


def measure_loads(measure: Measure) -> None:
    """Measure loads of a large state."""
    figures, _ = measure("load", claims.cold_load)
    names = ["milepost", "safetensors", "torch.load", "dcp.load"]
    rows = ratios(figures, "read limit", names, is_rate=True)
    table("Cold load into live tensors, share of the direct read rate", COLUMNS, rows)


def measure_small(measure: Measure) -> None:
    """Measure many small tensors."""
    figures, _ = measure("small", claims.many_small)
    rows = ratios(figures, "dcp.save", ["milepost save"], is_rate=False)
    table("10,000 tensors of 16 KiB, durable save, times DCP", COLUMNS, rows)
    rows = ratios(figures, "dcp.load", ["milepost load"], is_rate=False)
    table("10,000 tensors of 16 KiB, cold load, times DCP", COLUMNS, rows)


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


CLAIMS: dict[str, Callable[[Measure], None]] = {
    "save": measure_saves,
    "load": measure_loads,
    "small": measure_small,
    "2ranks": partial(measure_ranks, num_ranks=2),
    "4ranks": partial(measure_ranks, num_ranks=4),
    "reports": measure_reports,
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
    results: dict[str, Any] = {}

    def measure(name: str, claim: Claim) -> tuple[Figures, int]:
        folder = Path(tempfile.mkdtemp(prefix="milepost-bench-", dir=options.folder))
        try:
            before = limits.write_rate(folder, 2**30)
            figures, size = claim(folder, rounds=options.rounds)
            after = limits.write_rate(folder, 2**30)
        finally:
            shutil.rmtree(folder)
        print(
            f"\n[{name}] direct write limit before and after: {before / 1e9:.2f} and "
            f"{after / 1e9:.2f} GB/s"
        )
        results[name] = {"bytes": size, "rounds": figures.rounds, "limit": [before, after]}
        return figures, size

    for name in options.only:
        CLAIMS[name](measure)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
