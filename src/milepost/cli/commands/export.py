"""``milepost export``: a checkpoint as a file or folder for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...convert.dcp_trees import DCP_METADATA
from ...errors import MissingError, UsageError
from ...stores.url import is_address
from ..places import locate, path_of
from ..render import print_json, size_text

if TYPE_CHECKING:
    from ...state.source import StateSource

__all__ = ["export"]


class Format(str, Enum):
    """What to write."""

    torch = "torch"
    safetensors = "safetensors"
    dcp = "dcp"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="RUN/NAME, a run, a checkpoint's own folder, any .pt file, or a folder of "
            "torch.distributed.checkpoint."
        ),
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
            "safetensors: the weights of one model. "
            "dcp: a new folder for torch.distributed.checkpoint."
        ),
    ],
    only: Annotated[
        list[str] | None, typer.Option(metavar="ITEM", help="Only this item; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let a foreign file run code. Only for your own files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object.")] = False,
) -> None:
    """Write a checkpoint for other programs. Every byte of ours is checked on the way."""
    name, source = _open(checkpoint, trust=trust)
    from ...convert.export import export_checkpoint
    from ...engine.documents import layout_state
    from ...state.source import load_item

    wanted = only or (["model"] if to is Format.safetensors else list(source.trees))
    found = {item: load_item(source, item) for item in wanted}
    if to is Format.dcp:
        path = _export_folder(found, path_of(target), overwrite=overwrite)
    else:
        path = export_checkpoint(
            layout_state(found),
            path_of(target),
            to=to.value,
            items=wanted,
            name=name,
            overwrite=overwrite,
        )
    files = path.iterdir() if path.is_dir() else [path]
    num_bytes = sum(file.stat().st_size for file in files)
    if as_json:
        print_json({"path": str(path), "bytes": num_bytes, "items": wanted, "format": to.value})
    else:
        print(f"{path} ({size_text(num_bytes)})")


def _export_folder(state: Mapping[str, Any], target: Path, *, overwrite: bool) -> Path:
    if overwrite:
        raise UsageError("A folder is not replaced.", hint="Choose a name that is not taken.")
    from ...integrations.dcp.export import export_folder

    return export_folder(state, target)


def _open(place: str, *, trust: bool) -> tuple[str, StateSource]:
    """Return the name of a checkpoint, and its state."""
    try:
        checkpoint = locate(place).checkpoint
        return checkpoint.name.rpartition("/")[2], checkpoint.source()
    except MissingError:
        if is_address(place):
            raise
        path = path_of(place)
        if (path / DCP_METADATA).is_file():
            from ...convert.dcp import DcpSource

            return path.name, DcpSource(path, trust=trust)
        if not path.is_file():
            raise
    from ...convert.torch_file import torch_file_source

    return path.name.partition(".pt")[0], torch_file_source(path, trust=trust)
