"""Open checkpoints as a victim would, and tell what it took.

Reads paths of runs, one a line. Each is opened in a fork of its own: loaded, verified, its weights
loaded into a model, resumed from. The answer is one line of JSON: how each of these ended, the
seconds of processor time, and the memory in MiB beyond what the process had before.
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would load it

import milepost as mp
import milepost.engine.read
from milepost.testing.asserts import first_difference  # noqa: F401 - loads numpy


class Box:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        self.value = state["x"]


def memory(field):
    with Path("/proc/self/status").open() as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines[field].split()[0]) / 1024


def load(path):
    mp.open_run(path).get("a").load()


def verify(path):
    report = mp.open_run(path).get("a").verify()
    if report.is_good:
        return "good"
    return "reported"


def load_weights(path):
    mp.open_run(path).get("a").load_weights(torch.nn.Linear(2, 2), strict=False)


def resume(path):
    model = torch.nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(torch.arange(4.0), 2)
    optimizer = torch.optim.Adam(model.parameters())
    run = mp.Checkpointer(
        path, handle_signals=False, model=model, optimizer=optimizer, box=Box(), loader=loader
    )
    with run:
        next(run.batches(loader))


def tell(action, path):
    try:
        return action(path) or "done"
    except mp.CheckpointError as error:
        return type(error).__name__
    except BaseException as error:  # noqa: BLE001 - the answer is what it was
        return f"untyped {type(error).__name__}: {error}"[:300]


def victim(path):
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the parent
    before = memory("VmRSS")
    ends = {action.__name__: tell(action, path) for action in (load, verify, load_weights, resume)}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ends": ends,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "extra_mib": memory("VmHWM") - before,
    }


def main():
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                answer = json.dumps(victim(line.rstrip("\n")))
                os.write(writing, answer.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            answer = file.read()
        _, status = os.waitpid(pid, 0)
        print(answer or json.dumps({"status": status}), flush=True)


main()
