"""``milepost consolidate``: a checkpoint of several ranks as one of whole tensors."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ...display import loading_bar
from ..places import locate, path_of, target_of
from ..render import print_json, size_text
from ..sizes import parse_size
from ..tally import tally

__all__ = ["consolidate"]


class Format(str, Enum):
    """What to write."""

    milepost = "milepost"
    safetensors = "safetensors"
    torch = "torch"


def consolidate(
    checkpoint: Annotated[
        str, typer.Argument(help="RUN/NAME, a run (its newest), or a checkpoint's own folder.")
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE",
            help="A new run, or an address for one; for the other formats a new file, or a folder "
            "for it. By default in the working folder, called after the checkpoint.",
        ),
    ] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="milepost: a checkpoint, the first of a new run. safetensors: the weights of the "
            "model. torch: the whole state in one .pt.",
        ),
    ] = Format.milepost,
    name: Annotated[
        str | None, typer.Option(help="Name of the new checkpoint. By default that of the old.")
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="The most memory to take for tensors.")
    ] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Join the pieces that several ranks wrote into whole tensors.

    Every byte is checked on the way. No tensor is held whole, and no process group is needed.
    """
    memory_bytes = parse_size(memory)
    found = locate(checkpoint).checkpoint
    from ...consolidating import consolidate as join

    wanted = name or found.name.rpartition("/")[2]
    place_of = target_of if form is Format.milepost else path_of
    target = place_of(to or (f"{wanted}-consolidated" if form is Format.milepost else "."))
    with loading_bar(wanted, total_bytes=found.manifest.plain_bytes, is_shown=True) as bar:
        note = tally(bar)
        if form is Format.milepost:
            made = join(found, target, name=name, memory_bytes=memory_bytes, progress=note)
            place, num_bytes = made.url.removeprefix("file://"), made.manifest.size_bytes
        else:
            path = join(
                found,
                target,
                format=form.value,
                name=name,
                memory_bytes=memory_bytes,
                progress=note,
            )
            place, num_bytes = str(path), path.stat().st_size
    if as_json:
        print_json({"path": place, "bytes": num_bytes, "format": form.value})
    else:
        print(f"{place} ({size_text(num_bytes)})")
