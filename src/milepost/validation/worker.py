"""One validation: ``python -m milepost.validation.worker FOLDER``.

Reads ``task.json`` in the folder, calls the function with the checkpoint, and writes what came of
it to ``answer.json``: metrics, or an error. A process that ends without that file has died. The
answer counts whatever becomes of the process afterwards.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import MissingError, UsageError
from ..format import canonical, tree
from ..metrics import flatten, plain_metrics
from ..processes.functions import find_function
from ..processes.parent import end_with_parent
from ..runs.scan import State
from ..stores.url import open_store

__all__ = ["main"]

ANSWER, TASK = "answer.json", "task.json"
MAX_ANSWER_BYTES = 512 * 1024

_LEAVE_S = 10.0
_MAX_ERROR_CHARACTERS = 20_000


def main(folder: Path) -> None:
    """Validate; end with 1 if that raises."""
    task = json.loads((folder / TASK).read_text(encoding="ascii"))
    end_with_parent(task["parent_pid"])
    faulthandler.enable()
    sys.path[:] = dict.fromkeys([*task["sys_path"], *sys.path])
    try:
        answer = _answer(task)
    except BaseException as error:  # noqa: BLE001 - written down and printed; ends the process
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        _write(folder, {"error": text[-_MAX_ERROR_CHARACTERS:]})
        code = 1
    else:
        _write(folder, answer)
        code = 0
    # What the function has started may keep the process from ending; nobody waits for it.
    timer = threading.Timer(_LEAVE_S, lambda: os._exit(code))
    timer.daemon = True
    timer.start()
    raise SystemExit(code)


def _answer(task: Mapping[str, Any]) -> dict[str, Any]:
    function = find_function(task["fn"])
    store = open_store(task["place"])
    checkpoint = Checkpoint(store, task["name"], state=State.COMMITTED)
    if checkpoint.manifest.write_id != task["write_id"]:
        raise MissingError(
            f"The checkpoint {task['name']} that was to be validated is gone; there is another one "
            "of that name."
        )
    metrics = function(checkpoint, **tree.decode(task["fn_kwargs"]))
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"{task['fn']} returned a {type(metrics).__qualname__} and no dictionary of metrics.",
            hint='Return something like {"loss": 0.1}; an empty dictionary is one, too.',
        )
    found = flatten(plain_metrics(metrics))
    answer = {"metrics": tree.encode(found, path=("metrics",))}
    if len(canonical.dump(answer)) > MAX_ANSWER_BYTES:
        raise UsageError(
            f"{task['fn']} returned metrics of more than {MAX_ANSWER_BYTES:,} bytes.",
            hint="Return numbers, and keep everything else in files of your own.",
        )
    return answer


def _write(folder: Path, answer: Mapping[str, Any]) -> None:
    scratch = folder / f".{ANSWER}"
    scratch.write_bytes(canonical.dump(answer))
    scratch.replace(folder / ANSWER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
