"""The program ``milepost``: its verbs, put together."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, TextIO

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
from .words import options_of

__all__ = ["app", "main"]

_TYPED = "milepost.typed"
"""Where a call keeps the verb and what followed it."""


class _Group(TyperGroup):
    """Turns typed errors into a message on stderr and a documented exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        typed = ctx.meta.get(_TYPED, [])
        try:
            return super().invoke(ctx)
        except CheckpointError as error:
            verb = self.commands.get(typed[0]) if typed else None
            tell(error, options={} if verb is None else options_of(verb), typed=typed)
            raise typer.Exit(exit_of(error)) from error
        except BrokenPipeError:
            _drop(sys.stdout)
            raise typer.Exit(Exit.OUTPUT_CLOSED) from None
        except typer.Abort as error:  # a question that was not answered
            print("Nothing was done.", file=sys.stderr)
            is_interrupt = isinstance(error.__context__, KeyboardInterrupt)
            raise typer.Exit(Exit.INTERRUPTED if is_interrupt else Exit.USAGE) from None


_OUTPUT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})

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
app.command("verify", short_help="Compare a checkpoint, or all, with the checksums.")(verify.verify)
app.command("diff", short_help="Say what differs between two checkpoints.")(diff.diff)
app.command("prune")(prune.prune)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("cp")(cp.cp)
app.command("sync", short_help="Copy a run, or bring its copy up to date.")(sync.sync)
app.command("export")(export.export)
app.command("consolidate")(consolidate.consolidate)
app.command("import")(imports.import_)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command(
    "run",
    short_help="Run a script on workers, and bring them back.",
    context_settings={"allow_interspersed_args": False},
)(run.run)


def main() -> None:
    """Run the program and end the process with its exit code.

    The codes tell what is the matter with a checkpoint. What goes wrong with the program itself, or
    with where its output goes, must not look like one of those.
    """
    _open_streams()
    code: Any = Exit.OK
    try:
        app()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - it is shown
        code = _tell_failure(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:
        code = code or _tell_failure(error)
    sys.exit(code)


def _tell_failure(error: Exception) -> Exit:
    """Show what no verb expects: a mistake of ours, or an output that takes no more."""
    # Errors of places are typed, and those of files that are opened have a name.
    if isinstance(error, OSError) and not error.filename and error.errno in _OUTPUT_ERRNOS:
        _drop(sys.stdout)
        _say(f"error: The output could not be written: {error.strerror or error}.")
    else:
        _say("".join(traceback.format_exception(error)).rstrip())
    return Exit.STORAGE


def _open_streams() -> None:
    """See to it that there is an output, and that it takes every name."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - kept to the end
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    """Write to stderr, if that can be written to."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: nobody takes it."""
    with contextlib.suppress(io.UnsupportedOperation):  # not one of the process
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


if __name__ == "__main__":
    main()
