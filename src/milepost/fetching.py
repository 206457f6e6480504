"""How what is read of a checkpoint comes from a bucket, and what is shown of it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .display import loading_bar
from .errors import UsageError

__all__ = ["Fetching"]

_SHOWN_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetching:
    """Options of reading from a bucket. Files of this machine are read as ever, and not shown.

    Attributes:
        chunk_bytes: How much one request asks for, where it lies side by side: whole blocks of
            8 MiB, because a checksum is that of a whole block. With less than a block, up to 64 MiB
            where answers are read as they come, so that each of eight requests at a time has some
            of them, and a block elsewhere, where 128 MiB are on their way at most.
        is_bar_shown: Whether to show on standard error how far a download has come that is not
            small.
    """

    chunk_bytes: int = 0
    is_bar_shown: bool = False

    def __post_init__(self) -> None:
        value: Any = self.chunk_bytes
        if type(value) is not int or value < 0:
            raise UsageError(
                f"The size of a piece of a download is {value!r} and no count of bytes."
            )

    @contextmanager
    def shown(self, title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show a download; what comes out is told how many bytes have come.

        Args:
            title: What is downloaded.
            total_bytes: How much.
        """
        is_shown = self.is_bar_shown and total_bytes >= _SHOWN_BYTES
        done_bytes, lock = 0, threading.Lock()
        with loading_bar(title, total_bytes=total_bytes, is_shown=is_shown) as bar:

            def came(num_bytes: int) -> None:
                nonlocal done_bytes
                with lock:
                    done_bytes += num_bytes
                    bar.update(done_bytes)

            yield came
