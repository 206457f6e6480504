"""``milepost cp``: a checkpoint from any place to any other."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ...checkpoint import Checkpoint
from ...display import loading_bar
from ...stores.url import is_address
from ...transfers.one import copy_checkpoint
from ...transfers.reports import CopyReport
from ..escaped import escaped
from ..places import locate, path_of
from ..render import print_json, size_text
from ..tally import tally

__all__ = ["cp", "detail_of"]


def cp(
    source: Annotated[
        str, typer.Argument(help="RUN/NAME, a run (its newest), or a checkpoint's own folder.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="Folder or address of the copy. One that holds other files, or ends in a slash, "
            "gets it under its own name."
        ),
    ],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the copy back and compare every byte.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Copy a checkpoint; from and to folders and buckets.

    Every byte is checked on the way, and the commit comes last. A copy that was stopped goes on
    where it was, and what is there already is left alone.
    """
    found = locate(source).checkpoint
    given: Checkpoint | str = found.url if is_address(found.url) else found
    to = target if is_address(target) else _kept_slash(target)
    total_bytes = found.manifest.size_bytes * (2 if verify else 1)
    with loading_bar(found.name, total_bytes=total_bytes) as bar:
        report = copy_checkpoint(given, to, verify=verify, progress=tally(bar))
    if as_json:
        print_json(asdict(report))
    else:
        print(f"{report.url.removeprefix('file://')} ({detail_of(report)})")
    for name, why in report.skipped.items():
        print(f"left out: {escaped(name)}: {escaped(why)}", file=sys.stderr)


def detail_of(report: CopyReport) -> str:
    """Return in a few words how the bytes of a copy came to be where they are."""
    if not report.is_new:
        words = ["was there already"]
    else:
        kinds = {
            "sent": report.sent_bytes,
            "shared": report.shared_bytes,
            "from an earlier try": report.present_bytes,
        }
        words = [f"{size_text(count)} {kind}" for kind, count in kinds.items() if count]
    if report.verified_bytes:
        words.append(f"{size_text(report.verified_bytes)} read back")
    return ", ".join(words or ["nothing to send"])


def _kept_slash(target: str) -> str:
    return f"{path_of(target)}/" if target.endswith("/") else str(path_of(target))
