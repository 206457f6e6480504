"""Whether the parts of a save are compressed, and how, where that is left to be found out.

A save that is compressed takes as long as the slower of two: the codec for all bytes, or the place
for those that are left. So it is worth it only where the place is slower than the codec. How fast
the place is, saves without compression tell: two of them come first. How fast the codec is, and
what becomes of this state, one block of it tells, which is compressed in each way once; where the
place takes more than any codec gives, not even that.

Whoever wavers pays for both: it begins where a tenth of the time is to be won, and ends as soon as
nothing is. What was promised is held against what came: two saves in a row that took longer than
they would have without are the end of it for a while.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..format.digest import crc32c
from ..frames.codec import METHODS, Method, compress, has_codec
from .workers import num_cores

__all__ = ["Choice", "Sample", "Trial"]

FEWEST_BYTES = 32 * 1024 * 1024
"""Of a save that writes less nothing is concluded: what it takes is no matter of bytes."""

_PLAIN_SAVES = 2
_WORTH = 0.9
_MOST_BYTES_S = 6e9
_BURNT_SAVES = 20

_log = logging.getLogger("milepost")

Sample = Callable[[], tuple[memoryview, int]]
"""Returns a block of the state, and the bytes of an element of most of it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a method did to a block.

    Attributes:
        bytes_s: Plain bytes a second, of one thread.
        ratio: What was left of them.
    """

    bytes_s: float
    ratio: float


class Choice:
    """Decides save by save.

    Args:
        wanted: ``zstd`` or ``lz4``: always that. ``auto``: as described above. Else: never.
        num_threads: How many threads compress at once.
        clock: Returns seconds.

    Attributes:
        why: Why it is as it is; empty where it was given.
    """

    def __init__(
        self, wanted: str, *, num_threads: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._fixed = next((one for one in METHODS if one == wanted), None)
        self._is_auto = wanted == "auto"
        self._num_threads = min(num_threads, num_cores())
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=3)
        self._trials: Mapping[Method, Trial] = {}
        self._method: Method | None = None
        self._num_worse = 0
        self._num_rest = 0
        self.why = ""
        if self._is_auto and not has_codec():
            self._is_auto = False
            self._say("Parts are not compressed: blosc2 is not installed.")

    def method(self, sample: Sample) -> Method | None:
        """Return how the parts of the next save are compressed, if they are.

        Args:
            sample: Called if a block of the state is needed to find out.
        """
        if not self._is_auto:
            return self._fixed
        if len(self._rates) < _PLAIN_SAVES:
            return None
        rate = max(self._rates)
        if rate >= _MOST_BYTES_S:
            self._decide(None, f"the place takes {_rate(rate)}")
            return None
        if self._num_rest:
            self._num_rest -= 1
            return None
        if not self._trials:
            block, item_bytes = sample()
            try:
                self._trials = self._try(block, item_bytes)
            except Exception as error:  # noqa: BLE001 - of a library: no save may fail for its trial
                self._is_auto = False
                self._say(f"Parts are not compressed: {error}", level=logging.WARNING)
                return None
        self._weigh(rate)
        return self._method

    def note(
        self, *, plain_bytes: int, stored_bytes: int, write_s: float, put_s: float | None
    ) -> None:
        """Learn from a save.

        Args:
            plain_bytes: What was to be written.
            stored_bytes: What was written.
            write_s: How long that took.
            put_s: Of that the time in which the place took bytes, added up over the threads, if
                the save was compressed.
        """
        if not self._is_auto or plain_bytes < FEWEST_BYTES or write_s <= 0:
            return
        if self._method is None or put_s is None:
            self._rates.append(plain_bytes / write_s)
            return
        # Threads that waited for the place one after the other: it is at least as fast as that.
        at_least = stored_bytes / max(put_s, 1e-9)
        if at_least > max(self._rates):
            self._rates.append(at_least)
        is_worse = write_s > plain_bytes / max(self._rates)
        self._num_worse = self._num_worse + 1 if is_worse else 0
        if self._num_worse == 2:
            self._num_worse, self._num_rest = 0, _BURNT_SAVES
            self._decide(None, "compressed saves took longer than others did")

    def _try(self, block: memoryview, item_bytes: int) -> Mapping[Method, Trial]:
        trials: dict[Method, Trial] = {}
        for method in METHODS:
            # The first call of all would be taken for slow: it loads the library.
            compress(block[:65536], method=method, item_bytes=item_bytes)
            started_s = self._clock()
            crc32c(block)
            chunks = compress(block, method=method, item_bytes=item_bytes)
            took_s = max(self._clock() - started_s, 1e-9)
            stored_bytes = len(block) if chunks is None else sum(map(len, chunks))
            ratio = min(stored_bytes / len(block), 1.0)
            trials[method] = Trial(len(block) / took_s, ratio)
        return trials

    def _weigh(self, rate: float) -> None:
        def seconds(method: Method) -> float:
            """Return how long a byte takes."""
            trial = self._trials[method]
            return max(1 / (trial.bytes_s * self._num_threads), trial.ratio / rate)

        best = min(METHODS, key=seconds)
        plain_s, now = 1 / rate, self._method
        if now is not None and seconds(now) < plain_s and seconds(best) > _WORTH * seconds(now):
            return
        is_worth = seconds(best) < (plain_s if now is not None else _WORTH * plain_s)
        trial = self._trials[best]
        codec_rate = trial.bytes_s * self._num_threads
        self._decide(
            best if is_worth else None,
            f"the place takes {_rate(rate)}, and {best} makes {_rate(codec_rate)} into "
            f"{trial.ratio:.0%}",
        )

    def _decide(self, method: Method | None, why: str) -> None:
        was, self._method = self._method, method
        if method != was or not self.why:
            begin = f"Parts are compressed with {method}" if method else "Parts are not compressed"
            self._say(f"{begin}: {why}.")

    def _say(self, why: str, *, level: int = logging.INFO) -> None:
        self.why = why
        _log.log(level, "%s", why)


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:,.0f} MB/s"
