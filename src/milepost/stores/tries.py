"""Doing one request again, as long as that may help.

What is sent is held in memory by the caller, so that each try sends the same. Pauses between tries
grow and vary, and after a refusal for its own sake, "slow down", the requests of all threads to
that bucket wait too; see ``pace.py``. What cannot pass, such as a refused access, is raised after
one try. Bytes that came to harm on the way are asked for once more: those that come wrong twice
are wrong where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

from ..errors import CheckpointError, DamagedError
from .pace import Pace, varied
from .refusals import is_passing, says_slow_down

__all__ = ["Tries"]

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0
_FIRST_CONTACT_RETRIES = 6
"""A place that has never answered is more likely mistyped than unwell: about six seconds."""

_HARMED_TRIES = 4
"""Some gateways replace an object and its attributes one after the other: who reads in between
finds a checksum that is not that of the bytes, for a moment."""


@final
class Tries:
    """Runs requests to one bucket.

    Args:
        pace: The bucket's.
        max_retries: How often a request is tried again.
        timeout_s: No try begins later than this after the first.
        errors: What the client raises.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        max_retries: int,
        timeout_s: float,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._pace = pace
        self._max_retries = max_retries
        self._timeout_s = timeout_s
        self._errors = errors
        self._was_answered = False

    def pause(self, number: int) -> None:
        """Wait as before the try after so many that failed."""
        self._pace.sleep(_pause_s(number))

    def run(
        self,
        request: Callable[[], T],
        explain: Callable[[Exception, int], CheckpointError],
        *,
        max_retries: int | None = None,
        timeout_s: float | None = None,
        may_repeat: Callable[[CheckpointError], bool] = lambda _: True,
    ) -> T:
        """Return what a request returns.

        Args:
            request: Sends it once. Errors of this library that it raises go on as they are.
            explain: Returns the error to raise for what the client raised, and the number of tries.
            max_retries: How often it is tried again, if not as often as others.
            timeout_s: How long after the first try another may begin, if not as for others.
            may_repeat: Whether it can be sent again after an error.

        Raises:
            DamagedError: What came was wrong four times.
            CheckpointError: What ``explain`` has made of the last try.
        """
        pace = self._pace
        deadline_s = pace.clock() + (self._timeout_s if timeout_s is None else timeout_s)
        limit = self._max_retries if max_retries is None else max_retries
        number, num_harmed = 0, 0
        while True:
            pace.wait(deadline_s)
            number += 1
            try:
                result = request()
            except DamagedError:
                num_harmed += 1
                if num_harmed == _HARMED_TRIES:
                    raise
                pace.sleep(varied(_FIRST_PAUSE_S * 2**num_harmed))
                continue
            except CheckpointError:
                raise
            except self._errors as error:
                problem = explain(error, number)
            else:
                pace.speed_up()
                self._was_answered = True
                return result
            if says_slow_down(problem):
                pace.slow_down()
            self._was_answered = self._was_answered or problem.facts.get("status") is not None
            num_left = (limit if self._was_answered else min(limit, _FIRST_CONTACT_RETRIES)) + 1
            pause_s = _pause_s(number)
            is_late = pace.clock() + pause_s >= deadline_s
            if number >= num_left or is_late or not (is_passing(problem) and may_repeat(problem)):
                raise problem  # outside of the except block: the client's text stays behind
            pace.sleep(pause_s)


def _pause_s(number: int) -> float:
    return varied(min(_FIRST_PAUSE_S * 2 ** (number - 1), _LONGEST_PAUSE_S))
