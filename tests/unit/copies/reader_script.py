"""A process that reads a remote checkpoint.

python reader_script.py FAR LOG HOW

HOW is ``well``; ``hang`` stops for ever half-way through the download; ``fail`` makes the second
read fail once somebody has written a line to stdin; ``short`` waits for others for 0.2 s only.
Prints ``reading`` before the first block, ``in FOLDER`` when it has the folder, ``error KIND TEXT``
when it got none. Leaves when a line comes on stdin.
"""

from __future__ import annotations

import runpy
import sys
import threading
from pathlib import Path

from milepost.checkpoint import Checkpoint
from milepost.errors import CheckpointError, StorageError


class Reads:
    def __init__(self, how: str) -> None:
        self.how = how
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, key: str) -> None:
        with self.lock:
            self.count += 1
            number = self.count
        if number == 1:
            print("reading", flush=True)
        if number == 2 and self.how == "hang":
            threading.Event().wait(300)
        if number == 2 and self.how == "fail":
            sys.stdin.readline()
            raise StorageError("The line is down.")


def main(far: str, log: str, how: str) -> None:
    remote = runpy.run_path(str(Path(__file__).with_name("remote.py")))["RemoteStore"]
    checkpoint = Checkpoint(remote(far, log=log, before_read=Reads(how)), "ep1")
    options = {"stall_timeout_s": 0.2} if how == "short" else {}
    try:
        with checkpoint.as_directory(**options) as folder:
            print("in", folder, flush=True)
            sys.stdin.readline()
    except CheckpointError as error:
        print("error", error.kind, error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
