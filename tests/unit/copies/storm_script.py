"""A process that reads a remote checkpoint again and again until it is killed.

python storm_script.py FAR SEED

Prints ``ok`` after each look, ``bad`` if a byte was wrong.
"""

from __future__ import annotations

import random
import runpy
import sys
import threading
from pathlib import Path

from milepost.checkpoint import Checkpoint


def main(far: str, seed: int) -> None:
    draw = random.Random(seed)
    remote = runpy.run_path(str(Path(__file__).with_name("remote.py")))["RemoteStore"]
    expected = {
        path.relative_to(f"{far}/ep1"): path.read_bytes()
        for path in Path(far, "ep1").rglob("*")
        if path.is_file() and path.name != "attempt.json"
    }
    pause = threading.Event()
    while True:
        with Checkpoint(remote(far), "ep1").as_directory() as folder:
            for _ in range(draw.randrange(3)):
                pause.wait(draw.random() * 0.01)
                found = {path: Path(folder, path).read_bytes() for path in expected}
                print("ok" if found == expected else "bad", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
