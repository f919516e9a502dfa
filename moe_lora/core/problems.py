"""Problems that last while something is tried again and again."""

from __future__ import annotations


class LastProblem:
    """Tells a new problem from the one that was there before, so that each is logged once."""

    def __init__(self) -> None:
        self._last = ""

    def is_new(self, problem: str) -> bool:
        """Whether this is another problem than at the last call."""
        new = problem != self._last
        self._last = problem
        return new

    def over(self) -> None:
        """It works again: the next problem is new, be it the same."""
        self._last = ""
