"""Several ranks of one machine: FSDP2 with AdamW, beside torch.distributed.checkpoint.

The ranks are processes in one gloo group. A figure of a round is that of the slowest rank; bytes
are the sum over the ranks. Measured are saves until they let go of the training and until they are
durable, loads from a cold cache, and loads by another number of ranks.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from figures import Figures
from rank_work import NUM_LAYERS, WIDTH

from milepost.testing.ranks import run_ranks

_BODY = """
    import sys
    import warnings
    from pathlib import Path
    sys.path.insert(0, {home!r})
    warnings.simplefilter("ignore")
    import rank_work
    give(found=rank_work.{call})
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    import os
    os._exit(0)  # torch's own threads now and then abort the process as it ends
"""
_TIMEOUT_S = 1800.0


def save_and_load(folder: Path, *, num_ranks: int, rounds: int) -> tuple[Figures, int]:
    """Measure saves and loads on a number of ranks; the last round's checkpoints are left."""
    found = _run(f"save_and_load(Path({str(folder)!r}), rounds={rounds})", num_ranks)
    figures = Figures()
    for rows in zip(*found, strict=True):
        for name in rows[0]:
            figures.add(name, max(row[name] for row in rows))
    # Weights, and two moments of each.
    return figures, 3 * NUM_LAYERS * (WIDTH + 1) * WIDTH * 4


def reshard(
    folder: Path, *, num_ranks: int, name: str, by_columns: bool, rounds: int
) -> tuple[Figures, int]:
    """Measure loads of what :func:`save_and_load` has left, by another number of ranks.

    Returns:
        The figures, bytes by variant among them; and the bytes that the ranks need together.
    """
    call = (
        f"reshard(Path({str(folder)!r}), rounds={rounds}, name={name!r}, by_columns={by_columns})"
    )
    found = _run(call, num_ranks)
    figures = Figures()
    for rows in zip(*(one["rows"] for one in found), strict=True):
        for key in rows[0]:
            together = sum if key.endswith(" bytes") else max
            figures.add(key, together(row[key] for row in rows))
    return figures, sum(one["needed"] for one in found)


def _run(call: str, num_ranks: int) -> list[Any]:
    body = textwrap.dedent(_BODY).format(home=str(Path(__file__).parent), call=call)
    return [one["found"] for one in run_ranks(body, num_ranks, timeout_s=_TIMEOUT_S)]
