"""A look at uploads to a place in an object store that have not ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import CheckpointError
from ..runs.cut_off import end_cut_off, find_cut_off, why_unseen
from ..runs.scan import RunView
from ..stores.base import BegunUpload, Store
from .exits import tell
from .probes import OK, WARN, Check
from .render import count_text

__all__ = ["clean_uploads", "probe_uploads"]

_NAME = "cut-off uploads"
_RIGHTS = "It takes the rights to list the uploads of the bucket and the parts of each."


def probe_uploads(store: Store, view: RunView | None) -> Check:
    """Say what there is of uploads that nobody will end.

    Args:
        store: The place.
        view: The run there, if there is one.
    """
    why = why_unseen(store)
    if why:
        return Check(_NAME, OK, why)
    if view is None:
        return Check(_NAME, OK, "none of a run, since there is none")
    try:
        found = find_cut_off(store, view)
    except CheckpointError as error:
        return Check(_NAME, WARN, error.what.splitlines()[0], _RIGHTS)
    going = f"; {len(found.others)} may go on or are not ours" if found.others else ""
    if not found.dead:
        return Check(_NAME, OK, f"none{going}")
    hint = "They cost what objects cost. milepost prune ends them, and so does the next start."
    return Check(_NAME, WARN, f"{_text(found.dead)}{going}", hint)


def clean_uploads(store: Store, view: RunView, *, is_dry_run: bool, quiet: bool) -> list[str]:
    """End the uploads that nobody will end, and say so; return the keys they were for.

    Args:
        store: The run's store.
        view: The run.
        is_dry_run: Whether to say only what would be done.
        quiet: Whether nothing is said on stdout.
    """
    if store.traits.is_local:
        return []
    why = why_unseen(store)
    if why:
        print(f"Uploads that were cut off: {why}.", file=sys.stderr)
        return []
    try:
        found = find_cut_off(store, view)
    except CheckpointError as error:
        print(f"Uploads that were cut off are not known: {error.what}", file=sys.stderr)
        return []
    if is_dry_run:
        ended = list(found.dead)
    else:
        failed = end_cut_off(store, found.dead)
        for reason in failed.values():
            tell(reason)
        ended = [upload for upload in found.dead if upload.key not in failed]
    if ended and not quiet:
        print(f"{'To end' if is_dry_run else 'Ended'}: {_text(ended)}.")
    return sorted(upload.key for upload in ended)


def _text(uploads: Sequence[BegunUpload]) -> str:
    keys = sorted({upload.key for upload in uploads})
    names = ", ".join(keys[:5]) + (" ..." if len(keys) > 5 else "")
    return f"{count_text(len(uploads), 'upload')} of processes that have ended, {names}"
