"""``milepost verify``: is a checkpoint whole?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer

from ...checkpoint import Checkpoint
from ...display import loading_bar
from ...errors import CheckpointError
from ...runs.scan import State
from ...runs.verify import Level, Problem, VerifyReport
from ..escaped import escaped
from ..exits import Exit
from ..places import locate, locate_run
from ..render import count_text, print_json, size_text
from ..tally import tally

__all__ = ["verify"]

_UNFINISHED = (State.INCOMPLETE, State.DELETING)


class Verdict(str, Enum):
    """What a look has shown."""

    GOOD = "good"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    verdict: Verdict
    level: str
    checked_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    counts: bool = True


def verify(
    place: Annotated[
        str, typer.Argument(help="RUN/NAME, a run (its newest), or a checkpoint's own folder.")
    ] = ".",
    *,
    level: Annotated[
        Level, typer.Option(help="quick: records, sizes and headers. full: every byte.")
    ] = Level.FULL,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Every checkpoint of the run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Compare a checkpoint with its checksums; name the tensor, file and block that fail.

    Ends with 1 if one is damaged, with 5 if files or the commit are missing.
    """
    results = []
    for result in _look(place, level, everything=everything):
        results.append(result)
        if not as_json:
            _print(result)
    if as_json:
        print_json([_record(result) for result in results])
    verdicts = {result.verdict for result in results if result.counts}
    if Verdict.DAMAGED in verdicts:
        raise typer.Exit(Exit.DAMAGED)
    if Verdict.INCOMPLETE in verdicts:
        raise typer.Exit(Exit.INCOMPLETE)


def _look(place: str, level: Level, *, everything: bool) -> Iterator[_Result]:
    if not everything:
        checkpoint = locate(place).checkpoint
        yield _result(_verify(checkpoint, level), checkpoint)
        return
    run = locate_run(place)
    for found in run.view.found:
        if found.state in _UNFINISHED:
            # What was never committed, or is being deleted, is no loss: shown, not counted.
            yield _Result(found.name, Verdict.INCOMPLETE, level.value, counts=False)
        else:
            checkpoint = run.get(found.name)
            yield _result(_verify(checkpoint, level), checkpoint)


def _verify(checkpoint: Checkpoint, level: Level) -> VerifyReport:
    """Look at one, with a bar where every byte is read."""
    try:
        total_bytes = checkpoint.manifest.size_bytes
    except CheckpointError:
        return checkpoint.verify(level)  # whatever is wrong with it is told by this
    title = f"verify {checkpoint.name}"
    with loading_bar(title, total_bytes=total_bytes, is_shown=level is Level.FULL) as bar:
        return checkpoint.verify(level, progress=tally(bar))


def _result(report: VerifyReport, checkpoint: Checkpoint) -> _Result:
    verdict = Verdict.GOOD
    if report.problems:
        is_missing = all(problem.found == "missing" for problem in report.problems)
        verdict = Verdict.INCOMPLETE if is_missing else Verdict.DAMAGED
    name = report.name or checkpoint.name
    return _Result(name, verdict, report.level.value, report.checked_bytes, report.problems)


def _print(result: _Result) -> None:
    if result.verdict is Verdict.GOOD:
        detail = f"{result.level}, {size_text(result.checked_bytes)} compared"
    elif not result.problems:
        detail = "no commit"
    else:
        detail = count_text(len(result.problems), "problem")
    print(f"{escaped(result.name)}: {result.verdict.value} ({detail})")
    for problem in result.problems:
        print(f"  {escaped(problem.text)}")


def _record(result: _Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "verdict": result.verdict.value,
        "is_good": result.verdict is Verdict.GOOD,
        "level": result.level,
        "checked_bytes": result.checked_bytes,
        "problems": [
            {
                "file": problem.path,
                "block": problem.block,
                "expected": problem.expected,
                "found": problem.found,
                "tensors": list(problem.tensors),
                "text": problem.text,
            }
            for problem in result.problems
        ],
    }
