"""``milepost run``: a training script on several workers, brought back when they fail."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import UsageError

__all__ = ["run"]


def run(  # noqa: PLR0913 - an option each
    script: Annotated[str, typer.Argument(help="A Python file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")
    ] = None,
    *,
    workers: Annotated[
        str,
        typer.Option("--workers", "-n", metavar="N or N:M", help="How many; or from N to M."),
    ] = "1",
    max_failures: Annotated[
        int, typer.Option(help="Failures that are followed by a new attempt; -1: any number.")
    ] = 0,
    window_s: Annotated[
        float | None, typer.Option(help="Seconds after which a failure is forgotten.")
    ] = None,
    hang_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds without progress before all are restarted.")
    ] = None,
    start_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds to the first progress, likewise.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds to save and end when asked to end.")
    ] = 30.0,
    engine: Annotated[
        str, typer.Option(help="local: on this machine. ray: on a Ray cluster.")
    ] = "local",
    storage_path: Annotated[
        str, typer.Option(help="Folder or address of what the script reports.")
    ] = "runs",
    name: Annotated[str, typer.Option(help="Folder of this run in it.")] = "launched",
    local_path: Annotated[
        str | None, typer.Option(help="Folder of the logs, if it is another one.")
    ] = None,
) -> None:
    """Run a script on several workers, and bring them back when they fail.

    Options come before the script; all that follows it is for the script. Ends with 1 if the
    script failed, with 128 + the signal's number if this program was asked to end.
    """
    from ...launch import FailureConfig, RunConfig, ScalingConfig, launch

    failures = FailureConfig(
        max_failures=max_failures,
        window_s=window_s,
        hang_timeout_s=hang_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    launch(
        script,
        arguments or [],
        scaling=ScalingConfig(num_workers=_num_workers(workers)),
        engine=engine,
        run=RunConfig(
            storage_path=storage_path,
            name=name,
            local_path=local_path,
            failure_config=failures,
            grace_s=grace_s,
        ),
    )


def _num_workers(text: str) -> int | tuple[int, int]:
    parts = text.split(":")
    numbers = [int(part) for part in parts if part.isdecimal()]
    is_range = len(parts) in (1, 2) and len(numbers) == len(parts)
    if not is_range or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise UsageError(
            f"--workers {text} is no number of workers.", hint="Write 4, or 2:4 for from 2 to 4."
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
