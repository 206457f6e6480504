"""Write a checkpoint as one file that other programs read.

``torch``: the whole state in one ``.pt`` that ``torch.load(weights_only=True)`` takes. Optimizers
are stored by the names of their parameters, not by their positions, as everywhere in Milepost.
``safetensors``: the weights of the model, under plain names, and nothing else.

A file appears under its name only when it is whole and durable.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.single import check_plain
from ..errors import ExistsError, MissingError, UnsupportedStateError, UsageError, storage_error
from ..format.header import ITEM_SIZES, encode_header
from ..format.layout import ATTEMPT, MANIFEST
from ..stores import posix
from ..stores.posix import expanded
from ..tensors.pack import pack_item

__all__ = ["FORMATS", "export_checkpoint", "tied_names", "write_whole_file"]

FORMATS = {"torch": "checkpoint.pt", "safetensors": "model.safetensors"}
"""Name of the file by format, where the target is a folder."""

_WRITE_BYTES = 64 * 1024 * 1024


def export_checkpoint(
    state: Mapping[str, Any],
    target: str | os.PathLike[str],
    *,
    to: Literal["torch", "safetensors"],
    items: Collection[str] | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a state, as ``Checkpoint.load`` returns it, to one file.

    Args:
        state: ``{"state": {item: ...}, "rng": [...]}``.
        target: The file to write, or a folder that exists.
        to: ``torch`` or ``safetensors``.
        items: Only these items; ``None`` for all of them with ``torch``, and for ``model`` with
            ``safetensors``, which holds one model.
        name: Name of the checkpoint: the file in a folder is called after it, as ``ep3.pt``.
            ``None``: after what it holds, ``checkpoint.pt`` or ``model.safetensors``.
        overwrite: Whether a plain file of that name may be replaced.

    Returns:
        The path of the file.

    Raises:
        MissingError: An item that the state lacks.
        ExistsError: The file is there, and ``overwrite`` is false; or there is something that is no
            plain file, such as a link.
        UnsupportedStateError: A value that the format cannot hold. Nothing was written.
        UsageError: A target in the folder of a checkpoint, an unknown format, or more than one
            model for ``safetensors``.
    """
    if to not in FORMATS:
        raise UsageError(f"to={to!r} is not a format.", hint=f"Use one of {', '.join(FORMATS)}.")
    path = expanded(target).absolute()
    if path.is_dir():
        usual = FORMATS[to]
        path /= usual if name is None else f"{name}{Path(usual).suffix}"
    if not overwrite and os.path.lexists(path):
        raise _exists(path, hint="Choose another name, or replace it with overwrite=True.")
    members = {**state["state"], **({"rng": state["rng"]} if state.get("rng") else {})}
    wanted = _choose(members, items, to=to)
    writing = _write_torch(wanted) if to == "torch" else _write_safetensors(*wanted.items())
    write_whole_file(path, writing, overwrite=overwrite)
    return path


def _choose(
    members: Mapping[str, Any], items: Collection[str] | None, *, to: str
) -> dict[str, Any]:
    if items is None:
        items = ["model"] if to == "safetensors" else list(members)
    if to == "safetensors" and len(items) != 1:
        raise UsageError("A safetensors file holds one model.", hint="Name one item to export.")
    for item in items:
        if item not in members:
            raise MissingError(
                f"The checkpoint holds no item {item!r}.", hint=f"It holds {sorted(members)}."
            )
    return {item: members[item] for item in members if item in items}


def _write_torch(members: Mapping[str, Any]) -> Callable[[int], None]:
    state = {name: value for name, value in members.items() if name != "rng"}
    content = {"state": state, "rng": members.get("rng", [])}
    check_plain(content, ("checkpoint",))

    def write(descriptor: int) -> None:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            torch.save(content, file)

    return write


def _write_safetensors(item: tuple[str, Any]) -> Callable[[int], None]:
    name, weights = item
    packed = pack_item(name, dict(weights) if isinstance(weights, Mapping) else weights)
    metadata = {"format": "pt", **tied_names(name, packed.tree)}
    # Larger elements first: then every tensor is aligned to its own.
    found = zip(packed.leaves, packed.tensors, strict=True)
    leaves = sorted(found, key=lambda one: -ITEM_SIZES[one[0].code])
    header, _ = encode_header(
        ((leaf.key, leaf.code, leaf.shape, leaf.num_bytes) for leaf, _ in leaves),
        metadata=metadata,
    )

    def write(descriptor: int) -> None:
        posix.write_all(descriptor, header)
        for _, tensor in leaves:
            for block in _blocks(tensor):
                posix.write_all(descriptor, block)

    return write


def tied_names(item: str, tree: Any) -> dict[str, str]:
    """Return second names of tied weights with the name that is stored; refuse what does not fit.

    Args:
        item: Name of the item.
        tree: Its tree.

    Raises:
        UnsupportedStateError: A value that is not a plain dense tensor.
    """
    if not isinstance(tree, Mapping) or "$" in tree:
        raise UnsupportedStateError(
            f"{item} is not a table of tensors, and a safetensors file holds nothing else.",
            hint="Name the item of a model, or export to torch.",
            path=item,
        )
    tied = {}
    for name, tag in tree.items():
        is_plain = isinstance(tag, Mapping) and tag.get("$") == "tensor" and "dtype" not in tag
        if not is_plain:
            raise UnsupportedStateError(
                f"{item}[{name!r}] is not a dense tensor of a type that safetensors files hold.",
                hint="Export to torch instead.",
                path=f"{item}[{name!r}]",
            )
        if tag["key"] != name:
            tied[name] = str(tag["key"])
    return tied


def _blocks(tensor: Tensor) -> list[memoryview]:
    if tensor.numel() == 0:
        return []
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]  # arrays are buffers
    return [view[at : at + _WRITE_BYTES] for at in range(0, len(view), _WRITE_BYTES)]


def write_whole_file(path: Path, write: Callable[[int], None], *, overwrite: bool) -> None:
    """Write a hidden file beside the target, make it durable, and only then give it its name.

    Raises:
        ExistsError: There is something that is no plain file, or that may not be replaced.
        UsageError: The target is in the folder of a checkpoint.
    """
    _check_target(path)
    temporary = path.parent / posix.temporary_name()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = posix.create_file(str(temporary))
        try:
            try:
                write(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if overwrite:
                temporary.replace(path)
            else:
                _name_new(str(temporary), str(path))
        finally:
            temporary.unlink(missing_ok=True)
        posix.sync_folder(str(path.parent))
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise storage_error(error, operation="write", path=str(path)) from error


def _check_target(path: Path) -> None:
    """Refuse to replace a device, a link or a folder, and to write among the files of a checkpoint.

    A file there might be one of its own, and retention would stumble over any other.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass  # a folder that is no folder is told of when it is written to
    except OSError as error:
        raise storage_error(error, operation="look at", path=str(path)) from error
    else:
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
            raise ExistsError(
                f"{path} is {kind}.",
                safe="It was not touched.",
                hint="Name a new file, or one that may be replaced.",
                path=str(path),
            )
    if any(os.path.lexists(path.parent / record) for record in (MANIFEST, ATTEMPT)):
        raise UsageError(
            f"{path.parent} is the folder of a checkpoint.",
            safe="It was not touched.",
            hint="Export to another folder.",
            path=str(path),
        )


def _name_new(temporary: str, path: str) -> None:
    """Give the finished file its name, replacing nothing."""
    try:
        posix.link_new(temporary, path)
    except OSError as error:
        if error.errno not in posix.LINK_REFUSED:
            raise
        if not posix.rename_new(temporary, path):
            posix.copy_new(temporary, path)


def _exists(path: Path, *, hint: str = "Choose another name.") -> ExistsError:
    return ExistsError(
        f"{path} is already there.",
        safe="It was not touched.",
        hint=hint,
        path=str(path),
    )
