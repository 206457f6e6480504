"""The files that people see of a run whose records are hidden.

A run that saves single files keeps everything in ``.milepost/``, and each committed ``ep3.pt`` gets
a second name in the folder above: a hard link, made after the commit. The visible name is for
people; nothing is decided by it. Removing it by hand leaves the checkpoint in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from .errors import ExistsError, MissingError, UsageError
from .format.layout import HIDDEN
from .format.manifest import Manifest
from .frames.codec import METHODS, load_codec
from .stores.base import Store

__all__ = ["SUFFIXES", "VisibleFiles", "check_compression"]

_log = logging.getLogger("milepost")

SUFFIXES = {"": ".pt", "gzip": ".pt.gz", "bzip2": ".pt.bz2", "lzma": ".pt.xz"}
"""Ending of a single file by its compression."""


def check_compression(compression: str | None, save_format: str) -> str:
    """Return the compression to use; ``""`` for none.

    Single files are compressed whole, and parts block by block.

    Raises:
        UsageError: Unknown, of the other format, or of a library that is not installed.
    """
    name = compression or ""
    of_torch, of_parts = [one for one in SUFFIXES if one], [*METHODS, "auto"]
    if name not in ("", *of_torch, *of_parts):
        raise UsageError(
            f"save_compression={compression!r} is not known.",
            hint=f'Use {_quoted(of_parts)}, {_quoted(of_torch)} with save_format="torch", or '
            '"" for none.',
        )
    is_torch = save_format == "torch"
    if name and name not in (of_torch if is_torch else of_parts):
        raise UsageError(
            f"save_compression={compression!r} does not work with save_format={save_format!r}.",
            hint=f"Use {_quoted(of_torch if is_torch else of_parts)}, or "
            f'save_format="{"milepost" if is_torch else "torch"}", or "" for none.',
        )
    if name in METHODS:
        load_codec(f"save_compression={name!r}")
    return name


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


class VisibleFiles:
    """Names of single-file checkpoints in the folder that people look at.

    Args:
        base: The store of that folder.
    """

    def __init__(self, base: Store) -> None:
        self._base = base

    def show(self, manifest: Manifest) -> None:
        """Give a committed checkpoint its visible name; a file of another origin is left alone."""
        (entry,) = manifest.files
        try:
            self._base.link(f"{HIDDEN}/{manifest.name}/{entry.path}", entry.path)
        except ExistsError:
            _log.warning(
                "%s/%s was there already and was left alone; the checkpoint is in %s.",
                self._base.url,
                entry.path,
                HIDDEN,
            )
            return
        self._base.sync_folder("")

    def show_missing(self, manifest: Manifest) -> None:
        """Finish what a stop between a commit and its visible name has left."""
        try:
            self._base.head(manifest.files[0].path)
        except MissingError:
            self.show(manifest)

    def hide(self, names: Iterable[str]) -> None:
        """Remove the visible names of checkpoints that are about to be deleted.

        Files of another origin that bear such a name are left alone.
        """
        for name in names:
            for suffix in SUFFIXES.values():
                if self.is_ours(name, f"{name}{suffix}"):
                    self._base.delete(f"{name}{suffix}")

    def is_ours(self, name: str, visible: str) -> bool:
        """Return whether a visible file is the one that a checkpoint's record tells of.

        Args:
            name: The checkpoint.
            visible: Name of the file in the folder that people look at.
        """
        hidden = f"{HIDDEN}/{name}/{visible}"
        try:
            sizes = {self._base.head(key).size_bytes for key in (hidden, visible)}
        except MissingError:
            return False
        paths = [self._base.local_path(key) for key in (hidden, visible)]
        if None in paths or not self._base.traits.hard_links:
            return len(sizes) == 1
        first, second = (Path(path).stat() for path in paths if path is not None)
        is_linked = (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
        # Where the system refuses hard links the second name is a copy.
        return is_linked or (len(sizes) == 1 and first.st_nlink == 1 == second.st_nlink)
