"""Progress on a terminal, or one line now and then where there is none.

The only file besides ``cli/`` that draws with rich, and it imports rich when a bar is first shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

__all__ = ["Bar", "job_bar", "loading_bar", "training_bar"]

_LINE_EVERY_S = 30.0


class Bar(Protocol):
    """Something that shows how far a job has come."""

    def update(self, done: float, *, total: float | None = None, text: str = "") -> None:
        """Show a new position.

        Args:
            done: How much is done, in the unit of the total.
            total: The whole, where it has changed.
            text: What to say beside the bar.
        """


@contextmanager
def training_bar(
    *,
    total: float | None,
    done: float = 0,
    text: str = "",
    is_shown: bool = True,
    stream: TextIO | None = None,
) -> Iterator[Bar]:
    """Show the progress of a training.

    Args:
        total: All batches, or ``None`` where that is not known.
        done: Those that were trained before, by a run that is resumed.
        text: What to say beside the bar at the beginning.
        is_shown: False shows nothing: switched off, or not rank 0.
        stream: Where to write; standard error by default.
    """
    with _bar(
        "training",
        total=total,
        done=done,
        text=text,
        is_shown=is_shown,
        stream=stream,
        is_bytes=False,
    ) as bar:
        yield bar


@contextmanager
def loading_bar(
    title: str,
    *,
    total_bytes: int | None,
    is_shown: bool = True,
    stream: TextIO | None = None,
) -> Iterator[Bar]:
    """Show the progress of a download or a load.

    Args:
        title: What is being loaded.
        total_bytes: Its size, or ``None``.
        is_shown: False shows nothing.
        stream: Where to write; standard error by default.
    """
    with _bar(title, total=total_bytes, is_shown=is_shown, stream=stream, is_bytes=True) as bar:
        yield bar


@contextmanager
def job_bar(title: str, *, total: float, stream: TextIO | None = None) -> Iterator[Bar]:
    """Show how far any other job has come.

    Args:
        title: The job.
        total: The whole, in a unit of its own.
        stream: Where to write; standard error by default.
    """
    with _bar(title, total=total, is_shown=True, stream=stream, is_bytes=False) as bar:
        yield bar


@contextmanager
def _bar(
    title: str,
    *,
    total: float | None,
    done: float = 0,
    text: str = "",
    is_shown: bool,
    stream: TextIO | None,
    is_bytes: bool,
) -> Iterator[Bar]:
    out = sys.stderr if stream is None else stream
    if not is_shown:
        yield _NoBar()
    elif not out.isatty():
        yield _Lines(title, total, out)
    else:
        with _RichBar(title, total, out, done=done, text=text, is_bytes=is_bytes) as bar:
            yield bar


class _NoBar:
    """Shows nothing."""

    def update(self, done: float, *, total: float | None = None, text: str = "") -> None:
        pass


class _Lines:
    """Writes a line every half minute at most."""

    def __init__(self, title: str, total: float | None, out: TextIO) -> None:
        self._title = title
        self._total = total
        self._out = out
        self._written_s = time.monotonic()

    def update(self, done: float, *, total: float | None = None, text: str = "") -> None:
        self._total = self._total if total is None else total
        now_s = time.monotonic()
        if now_s - self._written_s < _LINE_EVERY_S:
            return
        self._written_s = now_s
        whole = "" if self._total is None else f" of {self._total:g}"
        print(f"{self._title}: {done:g}{whole} {text}".rstrip(), file=self._out, flush=True)


class _RichBar:
    """A bar that is redrawn in place."""

    def __init__(
        self,
        title: str,
        total: float | None,
        out: TextIO,
        *,
        done: float,
        text: str,
        is_bytes: bool,
    ) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        counts: Any = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            counts,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(file=out),
        )
        self._task = self._progress.add_task(title, total=total, text=text)
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> _RichBar:  # noqa: PYI034 - Self came with Python 3.11
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def update(self, done: float, *, total: float | None = None, text: str = "") -> None:
        changed: dict[str, Any] = {"completed": done, "text": text}
        if total is not None:
            changed["total"] = total
        self._progress.update(self._task, **changed)
