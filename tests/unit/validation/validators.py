"""Functions that validate, each in a way of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def good(checkpoint, **kwargs):
    with checkpoint.as_directory() as folder:
        text = Path(folder, "part").read_text()
    return {"loss": 0.5, "nested": {"text": text}, **kwargs}


def environment(checkpoint):
    return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "KEPT")}


def raises(checkpoint, code=None):
    if code is not None:
        raise SystemExit(code)
    raise ValueError("the data are gone")


def returns_list(checkpoint):
    return [0.5]


def odd_metrics(checkpoint, kind):
    import numpy as np

    return {
        "nan": {"loss": float("nan"), "worst": float("-inf")},
        "numpy": {"loss": np.float32(0.25), "count": np.int64(3), "flag": np.bool_(True)},
        "array": {"loss": np.zeros(3)},
        "object": {"loss": object()},
        "key": {3: 1.0},
        "huge": {f"metric-{n:06}": 1.0 for n in range(40_000)},
    }[kind]


def dies(checkpoint, how, log):
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\n")
    print("about to die")
    if how == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once(checkpoint, log):
    path = Path(log)
    if not path.exists():
        path.write_text("died")
        os._exit(3)
    return {"loss": 0.125}


def hangs(checkpoint, log, answers=False, ignores=False):
    """Start a child as well, note both, and never come back."""
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scratch = Path(f"{log}.tmp")
    scratch.write_text(f"{os.getpid()} {child.pid}")
    scratch.replace(log)
    if answers:  # and then a thread keeps the process from ending
        threading.Thread(target=time.sleep, args=(600,)).start()
    else:
        time.sleep(600)
    return {"loss": 1.5}


def meets(checkpoint, folder, number):
    """Wait until as many as given run at the same time; then wait for a word to go on."""
    (Path(folder) / checkpoint.name).touch()
    deadline_s = time.monotonic() + 30
    while len(list(Path(folder).iterdir())) < number and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {"seen": len(list(Path(folder).iterdir()))}
