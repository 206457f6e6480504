"""``milepost export``: a checkpoint as one file for other programs."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import MissingError
from ..places import locate, path_of
from ..render import print_json, size_text

if TYPE_CHECKING:
    from ...state.source import StateSource

__all__ = ["export"]


class Format(str, Enum):
    """What to write."""

    torch = "torch"
    safetensors = "safetensors"


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="RUN/NAME, a run, a checkpoint's own folder, or any .pt file.")
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="The file to write, or a folder: then it is called after the checkpoint."
        ),
    ],
    *,
    to: Annotated[
        Format,
        typer.Option(
            help="torch: the state in one .pt, optimizers by parameter name. "
            "safetensors: the weights of one model."
        ),
    ],
    only: Annotated[
        list[str] | None, typer.Option(metavar="ITEM", help="Only this item; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let a .pt file run code. Only for your own files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Write a checkpoint as one file. Every byte is checked on the way."""
    name, source = _open(checkpoint, trust=trust)
    from ...convert.export import export_checkpoint
    from ...engine.save import layout_state
    from ...state.source import load_item

    wanted = only or (["model"] if to is Format.safetensors else list(source.trees))
    state = layout_state({item: load_item(source, item) for item in wanted})
    path = export_checkpoint(
        state, path_of(target), to=to.value, items=wanted, name=name, overwrite=overwrite
    )
    num_bytes = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "bytes": num_bytes, "items": wanted, "format": to.value})
    else:
        print(f"{path} ({size_text(num_bytes)})")


def _open(place: str, *, trust: bool) -> tuple[str, StateSource]:
    """Return the name of a checkpoint, and its state."""
    try:
        checkpoint = locate(place).checkpoint
        return checkpoint.name.rpartition("/")[2], checkpoint.source()
    except MissingError:
        if not path_of(place).is_file():
            raise
    from ...convert.torch_file import torch_file_source

    path = path_of(place)
    return path.name.partition(".pt")[0], torch_file_source(path, trust=trust)
