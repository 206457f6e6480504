"""Saves two checkpoints into a folder and keeps the newest: the program that strace interrupts.

What it was told by the library it notes as empty folders beside the run, made with a system call
that is never interfered with. Run as ``strace_writer.py FOLDER``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from milepost.errors import CheckpointError
from milepost.runs import (
    KeepLast,
    Origin,
    Session,
    decide,
    ensure_run,
    open_session,
    prune,
    record_origin,
    scan,
    sweep,
    this_process,
)
from milepost.stores import LocalStore
from milepost.testing import save_files

FILES = {"model.bin": b"m" * 70_001, "index.json": b"{}"}
NUM_TRIES = 3


def main(folder: str) -> None:
    store = LocalStore(f"{folder}/run")

    def note(text: str) -> None:
        os.mkdir(f"{folder}/{text}")  # noqa: PTH102 - exactly one system call

    sessions: list[Session] = []

    def save(number: int, tried: int) -> bool:
        try:
            if not sessions:
                sessions.append(start(store))
            attempt = 10 * number + tried
            manifest = save_files(
                store, sessions[0], name=f"ep{number}", attempt=attempt, files=FILES
            )
        except CheckpointError as error:
            note(f"failed-{number}-{tried}-{error.kind}")
            return False
        note(f"acked-{manifest.name}")
        return True

    def clean_up(number: int) -> None:
        try:
            report = prune(store, decide(scan(store), [KeepLast(1)]), session=sessions[0])
            for name, error in report.errors.items():
                note(f"unpruned-{number}-{name}-{error.kind}")
        except CheckpointError as error:
            note(f"unpruned-{number}--{error.kind}")

    note("begun")
    for number in (1, 2):
        if any(save(number, tried) for tried in range(NUM_TRIES)):
            clean_up(number)
    note("over")


def start(store: LocalStore) -> Session:
    run = ensure_run(store)
    # Not every machine knows itself, and the test is to run on those too.
    me = replace(this_process(), machine_id="one")
    session = open_session(store, run, identity=me)
    latest = scan(store).latest()
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    session = record_origin(store, session, origin)
    sweep(store, session, identity=me)
    return session


if __name__ == "__main__":
    main(sys.argv[1])
