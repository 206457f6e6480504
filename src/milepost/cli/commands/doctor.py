"""``milepost doctor``: is a place fit for runs, and is the run there in order?"""

from __future__ import annotations

from typing import Annotated

import typer

from ...checkpoint import Run, run_store
from ...errors import CheckpointError
from ...stores.base import Store
from ...stores.url import is_address, open_store, trimmed
from ..escaped import escaped
from ..exits import Exit
from ..places import path_of
from ..probes import FAIL, OK, WARN, Check, nearest_folder, probe_folder, probe_run, probe_versions
from ..render import Column, count_text, print_json, print_table
from ..store_probes import probe_store
from ..upload_probe import probe_uploads

__all__ = ["doctor"]

_RETRY_TIMEOUT_S = 20.0
_MAX_RETRIES = 2
_COLUMNS = (Column("status"), Column("check"), Column("found"))


def doctor(
    place: Annotated[
        str, typer.Argument(help="A run, or a folder or an address where one shall be.")
    ] = ".",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Try what a run needs of a place, and look at the run there.

    Ends with 4 if nothing can be written there, with 6 if another check fails.
    """
    where, checks = _look(place)
    if as_json:
        print_json({"place": where, "checks": [_record(one) for one in checks]})
    else:
        print_table(_COLUMNS, [[one.status, one.name, one.text] for one in checks])
        _print_hints(checks)
    failed = [check.name for check in checks if check.status == FAIL]
    if failed:
        raise typer.Exit(Exit.ACCESS if "writable" in failed else Exit.STORAGE)


def _look(place: str) -> tuple[str, list[Check]]:
    if not is_address(place):
        path = path_of(place)
        found = [*probe_versions(), *probe_folder(nearest_folder(path)), *probe_run(path)]
        return str(path.absolute()), found
    store = _impatient(trimmed(place))
    found = [*probe_versions(), *probe_store(store)]
    is_reached = all(one.status != FAIL for one in found if one.name in ("list", "read"))
    return store.url, [*found, *(_look_at_run(store) if is_reached else [])]


def _look_at_run(store: Store) -> list[Check]:
    found = probe_run(store)
    run = run_store(store)
    try:
        view = None if run is None else Run(run).view
    except CheckpointError:
        return found  # said there
    return [*found, probe_uploads(run or store, view)]


def _impatient(address: str) -> Store:
    """Return the store at an address; one that does not answer is not waited for for minutes."""
    store = open_store(address)
    from ...stores.cloud import CloudStore

    if isinstance(store, CloudStore):
        return CloudStore(address, retry_timeout_s=_RETRY_TIMEOUT_S, max_retries=_MAX_RETRIES)
    return store


def _print_hints(checks: list[Check]) -> None:
    told = [check for check in checks if check.status != OK and check.hint]
    for check in told:
        print(f"{check.status} {check.name}: {escaped(check.hint)}")
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
