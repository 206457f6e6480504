"""How what is left of an epoch is dealt to ranks: arithmetic only, over places in one global order.

A step takes the next places of the order, and the ranks take them in turn: of a step from place
``a`` to ``b``, rank ``r`` of ``n`` gets ``a + r``, ``a + r + n``, and so on. So after any number of
steps what was used is a beginning of the order, whatever the number of ranks and the batch size,
and one number says how far the epoch has come.

Every rank makes the same number of steps, since ranks that wait for each other in a step would
wait for ever otherwise. The end of the epoch is where that needs a rule:

    all full            the places come out even
    the last is short   each rank still gets one sample, or as many as the others but for one
    the last two share  fewer places are left over than ranks: the step before gives some away, so
                        that each rank gets one
    filled up           the same, and there is no step before that could give: places beyond the end
                        stand for samples from the beginning of the order once more
    dropped             with ``drop_last``: only full steps

A deal begun again from any place between two steps is the rest of the deal before.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The steps that are left of an epoch.

    Attributes:
        start: How many places of the order were used before.
        length: Places of the whole order.
        num_ranks: Among how many ranks they are dealt.
        batch_size: The most that one rank gets in a step.
        drop_last: Whether a last step that is not full is left out.
    """

    start: int
    length: int
    num_ranks: int
    batch_size: int
    drop_last: bool

    @property
    def num_steps(self) -> int:
        """Return how many steps each rank makes."""
        full, left_over = self._full_and_left_over
        return full if self.drop_last or not left_over else full + 1

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first place of a step, and the place behind its last.

        Places from ``length`` on are those that fill up the last step.
        """
        return self._end(step), self._end(step + 1)

    def used_after(self, num_steps: int) -> int:
        """Return how many places of the order are used once some of the steps are made."""
        return min(self._end(min(num_steps, self.num_steps)), self.length)

    @property
    def _full_and_left_over(self) -> tuple[int, int]:
        return divmod(self.length - self.start, self.num_ranks * self.batch_size)

    def _end(self, num_steps: int) -> int:
        """Return the place behind the last one of the first few steps."""
        full, left_over = self._full_and_left_over
        end_of_full = self.start + num_steps * self.num_ranks * self.batch_size
        if self.drop_last or not left_over or num_steps < full:
            return end_of_full
        is_too_few = left_over < self.num_ranks
        gives = is_too_few and self.batch_size > 1 and full > 0
        if num_steps == full:
            return self.length - self.num_ranks if gives else end_of_full
        return self.length - left_over + self.num_ranks if is_too_few and not gives else self.length
