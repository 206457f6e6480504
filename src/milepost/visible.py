"""The files that people see of a run whose records are hidden.

A run that saves single files keeps everything in ``.milepost/``, and each committed ``ep3.pt`` gets
a second name in the folder above: a hard link, made after the commit. The visible name is for
people; nothing is decided by it. Removing it by hand leaves the checkpoint in place.
"""

from __future__ import annotations

import logging

from .errors import ExistsError, MissingError
from .format.layout import HIDDEN
from .format.manifest import Manifest
from .stores.base import Store

__all__ = ["SUFFIXES", "VisibleFiles"]

_log = logging.getLogger("milepost")

SUFFIXES = {"": ".pt", "gzip": ".pt.gz", "bzip2": ".pt.bz2", "lzma": ".pt.xz"}
"""Ending of a single file by its compression."""


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

    def hide(self, name: str) -> None:
        """Remove the visible name of a checkpoint that was deleted."""
        for suffix in SUFFIXES.values():
            self._base.delete(f"{name}{suffix}")
