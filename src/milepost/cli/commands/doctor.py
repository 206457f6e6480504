"""``milepost doctor``: is a place fit for runs, and is the run there in order?"""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import UsageError
from ..exits import Exit
from ..places import path_of
from ..probes import FAIL, OK, WARN, Check, nearest_folder, probe_folder, probe_run, probe_versions
from ..render import Column, count_text, print_json, print_table

__all__ = ["doctor"]

_COLUMNS = (Column("status"), Column("check"), Column("found"))


def doctor(
    place: Annotated[str, typer.Argument(help="A run, or a folder where one shall be.")] = ".",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Try what a run needs of a place, and look at the run there.

    Ends with 4 if nothing can be written there, with 6 if another check fails.
    """
    if "://" in place and not place.startswith("file://"):
        raise UsageError(f"{place} is not a folder.", hint="Only local places can be examined.")
    path = path_of(place)
    checks = [*probe_versions(), *probe_folder(nearest_folder(path)), *probe_run(path)]
    if as_json:
        print_json({"place": str(path.absolute()), "checks": [_record(one) for one in checks]})
    else:
        print_table(_COLUMNS, [[one.status, one.name, one.text] for one in checks])
        _print_hints(checks)
    failed = [check.name for check in checks if check.status == FAIL]
    if failed:
        raise typer.Exit(Exit.ACCESS if "writable" in failed else Exit.STORAGE)


def _print_hints(checks: list[Check]) -> None:
    told = [check for check in checks if check.status != OK and check.hint]
    for check in told:
        print(f"{check.status} {check.name}: {check.hint}")
    num_warned = sum(check.status == WARN for check in checks)
    num_failed = sum(check.status == FAIL for check in checks)
    print(
        f"{count_text(len(checks), 'check')}, {count_text(num_warned, 'warning')}, "
        f"{num_failed} failed"
    )


def _record(check: Check) -> dict[str, str]:
    return {
        "check": check.name,
        "status": check.status,
        "text": check.text,
        "hint": check.hint,
    }
