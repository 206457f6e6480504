"""``milepost bench``: what checkpoints cost at a place."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...checkpoint import Run, run_store
from ...display import job_bar
from ..places import target_of
from ..render import Column, count_text, print_json, print_table, size_text, span_text
from ..sizes import parse_size

if TYPE_CHECKING:
    from ...measuring.figures import Costs, PlaceFigures

__all__ = ["bench"]

_DEFAULT_BYTES = 10 * 1024**3
_COLUMNS = (
    Column(""),
    Column("at best", is_number=True),
    Column("milepost", is_number=True),
    Column("share", is_number=True),
)


def bench(
    place: Annotated[str, typer.Argument(help="A folder or an address.")] = ".",
    *,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Say what a checkpoint of this size costs. By default that of the newest one "
            "there, or 10GiB.",
        ),
    ] = None,
    probe: Annotated[
        str, typer.Option(metavar="SIZE", help="What to write and read; less at a slow place.")
    ] = "256MiB",
    seconds: Annotated[
        float, typer.Option(help="How long to measure; one round in any case.", min=1.0)
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Measure a place, and say what a checkpoint costs there.

    Memory, disk or network at best, and real saves and loads beside. Nothing is left there.
    """
    probe_bytes = parse_size(probe)
    target = target_of(place)
    size_bytes = _newest_bytes(place) if size is None else parse_size(size)
    from ...measuring.figures import costs_of
    from ...measuring.place import measure_place

    with job_bar("measuring, in percent", total=100) as bar:
        figures = measure_place(
            target,
            probe_bytes=probe_bytes,
            seconds=seconds,
            progress=lambda share: bar.update(round(100 * share)),
        )
    costs = costs_of(figures, size_bytes)
    if as_json:
        print_json({**asdict(figures), "costs": asdict(costs)})
        return
    _print_figures(figures)
    _print_costs(costs)


def _newest_bytes(place: str) -> int:
    store = run_store(target_of(place))
    latest = None if store is None else Run(store).latest()
    return _DEFAULT_BYTES if latest is None else latest.manifest.plain_bytes


def _print_figures(figures: PlaceFigures) -> None:
    limits, large = figures.limits, figures.large
    rounds = f"{count_text(figures.num_rounds, 'round')} in {span_text(figures.took_s)}"
    print(f"{figures.url}: {size_text(large.size_bytes)}, the median of {rounds}")
    rates = (
        ("copy in memory, which training waits for", limits.copy_bytes_s, large.blocking_s),
        ("write until safe, beside training", limits.write_bytes_s, large.durable_s),
        ("read after a restart", limits.read_bytes_s, large.load_s),
    )
    rows = []
    for name, limit, took_s in rates:
        rate = large.size_bytes / took_s
        rows.append([name, _rate(limit), _rate(rate), f"{100 * rate / limit:.0f} %"])
    small = {
        "fsync of a small file": limits.sync_s,
        "hard link": limits.link_s,
        "write of a small object": limits.put_s,
        "read of a small object": limits.get_s,
    }
    rows += [[name, span_text(value), "", ""] for name, value in small.items() if value is not None]
    rows.append(["a checkpoint of 64 KiB, until safe", "", span_text(figures.small.durable_s), ""])
    print_table(_COLUMNS, rows)


def _print_costs(costs: Costs) -> None:
    lines = {
        "training waits": f"{span_text(costs.blocking_s)}, the first time "
        f"{span_text(costs.first_blocking_s)}",
        "safe after": span_text(costs.durable_s),
        "loaded in": span_text(costs.load_s),
        "save every": f"{span_text(costs.interval_s)}, or more rarely: {_why(costs)}",
    }
    print(f"\nA checkpoint of {size_text(costs.size_bytes)} here:")
    width = max(map(len, lines))
    for title, text in lines.items():
        print(f"  {title:<{width}}  {text}")


def _why(costs: Costs) -> str:
    if costs.interval_s > costs.durable_s:
        return "then saving takes 1 % of the time at most"
    return "then each save is safe before the next one begins"


def _rate(bytes_s: float) -> str:
    return f"{size_text(int(bytes_s))}/s"
