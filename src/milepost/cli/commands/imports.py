"""``milepost import``: a checkpoint of another tool as the first of a new run."""

from __future__ import annotations

from typing import Annotated

import typer

from ..places import path_of, target_of
from ..render import print_json, size_text

__all__ = ["import_"]


def import_(
    source: Annotated[
        str,
        typer.Argument(help="A folder that torch.distributed.checkpoint wrote, or a .pt file."),
    ],
    run: Annotated[
        str, typer.Argument(help="The new run: a folder or an address without checkpoints.")
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="Name of the checkpoint. By default that of the source.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ITEM", help="Only this item; may be repeated.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the source run code. Only for your own files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Make a checkpoint of a new run out of one of another tool."""
    from ...importing import import_checkpoint

    found = import_checkpoint(path_of(source), target_of(run), name=name, items=only, trust=trust)
    manifest = found.manifest
    if as_json:
        print_json({"url": found.url, "bytes": manifest.size_bytes, "items": list(manifest.items)})
    else:
        print(f"{found.url.removeprefix('file://')} ({size_text(manifest.size_bytes)})")
