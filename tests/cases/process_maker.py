"""Start programs that have torch loaded already.

Reads one JSON object a line: a program to start, or one to wait for. A program is run by a fork of
this process, as its main module, and ends as any program does: with its own exit code, after the
interpreter's usual last steps. Only loading torch again and again is left out.
"""

import json
import os
import runpy
import sys

import torch._dynamo  # noqa: F401 - the first step of an optimizer would load it

import milepost.checkpointer
import milepost.engine.read  # noqa: F401


def wait_for_orders():
    """Serve until there is a program for this very process to run; return it."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                return order
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    sys.exit(0)


order = wait_for_orders()
os.chdir(order["folder"])
for descriptor, name in ((1, "out"), (2, "err")):
    file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, descriptor)
    os.close(file)
sys.stdin.close()
sys.argv = [order["script"], *order["arguments"]]
runpy.run_path(order["script"], run_name="__main__")
