"""``milepost prune``: give up checkpoints by policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ...errors import UsageError
from ...runs.keep import KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepWithin
from ...runs.prune import Decision, PruneReport, decide
from ...runs.prune import prune as prune_run
from ..exits import exit_of, tell
from ..places import locate_run
from ..render import Column, count_text, print_json, print_table, size_text
from ..upload_probe import clean_uploads

__all__ = ["prune"]

_COLUMNS = (
    Column("name"),
    Column("verdict"),
    Column("size", is_number=True),
    Column("reason"),
)


def prune(  # noqa: PLR0913 - one option for each policy
    run: Annotated[str, typer.Argument(help="The folder of a run.")],
    *,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the newest N.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC:min|max[:N]", help="Keep the N best, 1 if N is left out."),
    ] = None,
    keep_every: Annotated[
        list[str] | None,
        typer.Option(metavar="INTERVAL", help="Keep the first at each multiple: 10ep, 1000ba."),
    ] = None,
    keep_within: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Keep those made so long before the newest: 24h."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Give the reason for each.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Delete the checkpoints that no policy keeps.

    What at least one policy keeps, stays. The newest and pinned ones always stay, and so does
    everything that does not count; see milepost ls --all. In S3, uploads of processes that have
    ended are ended too.
    """
    policies = _policies(keep_last, keep_best or (), keep_every or (), keep_within)
    opened = locate_run(run)
    decisions = decide(opened.view, policies)
    sizes = {found.name: found.size_bytes for found in opened.view.found}
    victims = [decision.name for decision in decisions if not decision.keep]
    if not as_json:
        _print_plan(decisions, sizes, why=why)
    is_going = bool(victims) and not dry_run and _may_delete(len(victims), yes=yes, quiet=as_json)
    if is_going and opened.visible is not None:
        opened.visible.hide(victims)
    report = prune_run(opened.store, decisions) if is_going else PruneReport()
    # What is asked about is deletion of checkpoints: these are none.
    ended = clean_uploads(opened.store, opened.view, is_dry_run=dry_run, quiet=as_json)
    if as_json:
        record = _record(policies, decisions, sizes, report, is_dry_run=dry_run)
        print_json({**record, "ended_uploads": ended})
    elif is_going:
        print(f"Deleted {len(report.deleted)}, {size_text(report.freed_bytes)}.")
    elif victims:
        print("Nothing was deleted.")
    for error in report.errors.values():
        tell(error)
    if report.errors:
        raise typer.Exit(exit_of(next(iter(report.errors.values()))))


def _policies(
    keep_last: int | None,
    keep_best: Sequence[str],
    keep_every: Sequence[str],
    keep_within: str | None,
) -> list[KeepPolicy]:
    policies: list[KeepPolicy] = []
    if keep_last is not None:
        policies.append(KeepLast(keep_last))
    policies += [_parse_best(text) for text in keep_best]
    policies += [KeepEvery(text) for text in keep_every]
    if keep_within is not None:
        policies.append(KeepWithin(keep_within))
    if not policies:
        raise UsageError(
            "There is no policy, so everything would stay.",
            hint="Add --keep-last, --keep-best, --keep-every or --keep-within.",
        )
    return policies


def _parse_best(text: str) -> KeepBest:
    head, _, tail = text.rpartition(":")
    count = 1
    if head and tail.isdecimal():
        count, text = int(tail), head
    metric, _, mode = text.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise UsageError(
            f"--keep-best {text!r} does not say what is best.",
            hint="Write METRIC:min or METRIC:max, and :N for more than one, as in loss:min:3.",
        )
    return KeepBest(count, metric, mode)


def _may_delete(count: int, *, yes: bool, quiet: bool) -> bool:
    if yes:
        return True
    if quiet or not sys.stdin.isatty():
        raise UsageError(
            f"{count_text(count, 'checkpoint')} would be deleted, and nobody can be asked.",
            safe="Nothing was deleted.",
            hint="Add --yes to delete them, or --dry-run to only look.",
        )
    return typer.confirm(f"Delete {count_text(count, 'checkpoint')} for good?", err=True)


def _print_plan(decisions: Sequence[Decision], sizes: dict[str, int], *, why: bool) -> None:
    rows = [
        [
            decision.name,
            "keep" if decision.keep else "remove",
            size_text(sizes[decision.name]),
            decision.reason if why else "",
        ]
        for decision in decisions
        if why or not decision.keep
    ]
    print_table(_COLUMNS, rows)
    victims = [decision.name for decision in decisions if not decision.keep]
    total = size_text(sum(sizes[name] for name in victims))
    print(f"{len(decisions) - len(victims)} stay, {len(victims)} to remove ({total}).")


def _record(
    policies: Sequence[KeepPolicy],
    decisions: Sequence[Decision],
    sizes: dict[str, int],
    report: PruneReport,
    *,
    is_dry_run: bool,
) -> dict[str, Any]:
    return {
        "policies": [str(policy) for policy in policies],
        "is_dry_run": is_dry_run,
        "decisions": [
            {
                "name": decision.name,
                "keep": decision.keep,
                "reason": decision.reason,
                "bytes": sizes[decision.name],
            }
            for decision in decisions
        ],
        "deleted": list(report.deleted),
        "freed_bytes": report.freed_bytes,
        "errors": {name: str(error) for name, error in report.errors.items()},
    }
