"""``milepost sync``: a whole run to another place."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ...display import loading_bar
from ...stores.url import is_address
from ...transfers.reports import SyncReport
from ...transfers.whole import SyncPlan, plan_sync
from ..exits import exit_of, tell
from ..places import path_of
from ..render import Column, count_text, print_json, print_table, size_text
from ..tally import tally
from .cp import detail_of

__all__ = ["sync"]

_COLUMNS = (Column("name"), Column("state"), Column("size", is_number=True), Column("how"))


def sync(
    source: Annotated[str, typer.Argument(help="The folder or address of a run.")],
    target: Annotated[str, typer.Argument(help="An empty place, or an earlier copy of the run.")],
    *,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete",
            help="Delete checkpoints there that the run does not have any more; pinned ones stay.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every checkpoint there and compare every byte."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Copy a run to another place, or bring its copy there up to date.

    Every byte is checked on the way, and the commit of each checkpoint comes last. Nothing there is
    deleted unless asked for.
    """
    source, target = (
        place if is_address(place) else str(path_of(place)) for place in (source, target)
    )
    plan = plan_sync(source, target, delete=delete)
    if dry_run:
        _print_plan(plan, as_json=as_json)
        return
    with loading_bar("sync", total_bytes=_total_bytes(plan, verify=verify)) as bar:
        report = plan.run(verify=verify, progress=tally(bar))
    if as_json:
        print_json(_record(report))
    else:
        _print(report, plan)
    for error in report.errors.values():
        tell(error)
    if report.errors:
        raise typer.Exit(exit_of(next(iter(report.errors.values()))))


def _total_bytes(plan: SyncPlan, *, verify: bool) -> int:
    missing_bytes = sum(found.size_bytes for found in plan.missing)
    if not verify:
        return missing_bytes
    return 2 * missing_bytes + sum(found.size_bytes for found in plan.present)


def _print_plan(plan: SyncPlan, *, as_json: bool) -> None:
    missing, present, doomed = plan.missing, plan.present, plan.doomed
    if as_json:
        print_json(
            {
                "url": plan.base.url,
                "to_copy": [{"name": one.name, "bytes": one.size_bytes} for one in missing],
                "present": [one.name for one in present],
                "skipped": plan.skipped,
                "to_delete": [one.name for one in doomed],
            }
        )
        return
    rows = [[one.name, "copy", size_text(one.size_bytes), ""] for one in missing]
    rows += [[one.name, "delete", size_text(one.size_bytes), ""] for one in doomed]
    rows += [[name, "leave out", "", why] for name, why in plan.skipped.items()]
    print_table(_COLUMNS, rows)
    total = size_text(sum(one.size_bytes for one in missing))
    print(f"{len(missing)} to copy (at most {total}), {len(present)} there already.")


def _print(report: SyncReport, plan: SyncPlan) -> None:
    sizes = {found.name: found.size_bytes for found in plan.view.found}
    rows = [
        [one.name, "copied", size_text(sizes[one.name]), detail_of(one)] for one in report.copied
    ]
    rows += [[name, "deleted", "", ""] for name in report.deleted]
    rows += [[name, "left out", "", why] for name, why in report.skipped.items()]
    rows += [[name, "failed", "", error.kind] for name, error in report.errors.items()]
    print_table(_COLUMNS, rows)
    words = [f"{len(report.copied)} copied", f"{len(report.present)} there already"]
    words += [f"{len(report.deleted)} deleted"] if report.deleted else []
    words += [f"{len(report.errors)} failed"] if report.errors else []
    words += [count_text(report.num_records, "record")] if report.num_records else []
    words += [f"{size_text(report.verified_bytes)} read back"] if report.verified_bytes else []
    print(f"{report.url.removeprefix('file://')}: {', '.join(words)}.")


def _record(report: SyncReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "copied": [asdict(one) for one in report.copied],
        "present": list(report.present),
        "skipped": dict(report.skipped),
        "deleted": list(report.deleted),
        "num_records": report.num_records,
        "verified_bytes": report.verified_bytes,
        "errors": {name: str(error) for name, error in report.errors.items()},
    }
