"""A run on a store, as records: sessions, commits, retention, verification."""

from __future__ import annotations

from .cut_off import CutOff, end_cut_off, find_cut_off
from .identity import Identity, this_process
from .keep import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepWithin,
    Record,
    keep_any,
)
from .pins import is_pinned, list_pins, pin, unpin
from .prune import Decision, PruneReport, decide, delete_checkpoint, prune, sweep
from .publish import Claim, abandon, adopt, claim, point_latest, publish, withdraw
from .scan import Found, RunView, State, read_manifest, scan
from .sessions import (
    Origin,
    RunRecord,
    Session,
    check_not_fenced,
    ensure_run,
    is_provably_dead,
    list_sessions,
    open_session,
    read_run,
    record_origin,
)
from .validations import Validation, ValidationStatus, list_validations
from .verify import Level, Problem, VerifyReport, newest_good, verify

__all__ = [
    "Claim",
    "CutOff",
    "Decision",
    "Found",
    "Identity",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepWithin",
    "Level",
    "Origin",
    "Problem",
    "PruneReport",
    "Record",
    "RunRecord",
    "RunView",
    "Session",
    "State",
    "Validation",
    "ValidationStatus",
    "VerifyReport",
    "abandon",
    "adopt",
    "check_not_fenced",
    "claim",
    "decide",
    "delete_checkpoint",
    "end_cut_off",
    "ensure_run",
    "find_cut_off",
    "is_pinned",
    "is_provably_dead",
    "keep_any",
    "list_pins",
    "list_sessions",
    "list_validations",
    "newest_good",
    "open_session",
    "pin",
    "point_latest",
    "prune",
    "publish",
    "read_manifest",
    "read_run",
    "record_origin",
    "scan",
    "sweep",
    "this_process",
    "unpin",
    "verify",
    "withdraw",
]
