"""The program ``milepost``: its verbs, put together."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import CheckpointError
from ..version import __version__
from .commands import (
    bench,
    consolidate,
    cp,
    diff,
    doctor,
    export,
    imports,
    ls,
    pin,
    prune,
    run,
    show,
    sync,
    verify,
)
from .exits import CODES_TEXT, Exit, exit_of, tell

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """Turns typed errors into a message on stderr and a documented exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            tell(error)
            raise typer.Exit(exit_of(error)) from error
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(Exit.OUTPUT_CLOSED) from None


app = typer.Typer(
    cls=_Group,
    name="milepost",
    help="Look at, check, compare, export and tidy up checkpoints of training runs.",
    epilog=CODES_TEXT,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - the form that typer calls
    if value:
        print(f"milepost {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("prune")(prune.prune)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("cp")(cp.cp)
app.command("sync")(sync.sync)
app.command("export")(export.export)
app.command("consolidate")(consolidate.consolidate)
app.command("import")(imports.import_)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)


def main() -> None:
    """Run the program and end the process with its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - kept to the end
            setattr(sys, name, nowhere)
    try:
        app()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()


def _drop_output() -> None:
    """Let what is still buffered go nowhere: whoever read our output has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    main()
