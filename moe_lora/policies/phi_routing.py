"""Requests by a routing table of shares, which may be swapped at any moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .routing import Instance, LeastOutstanding, RoutedView

_Row = tuple[tuple[int, float], ...]


class _Turns:
    """A table and how far each adapter has come in it."""

    def __init__(self, table: Mapping[str, _Row]) -> None:
        self.table = table
        self.credits: dict[str, dict[int, float]] = {}


class PhiRouting:
    """Each adapter's requests over its instances in proportion to phi.

    The paper draws an instance with probability phi.  Here they come in turn (smooth weighted round robin):
    every instance of the adapter gains its phi, the one with the most gives 1 and gets the request; so of n
    requests an instance's number is below phi · n + 1, and above phi · n - (instances - 1).  Absent instances
    leave their share to the others.  The base model, adapters that the table does not have, and those of
    which no instance is there go where the least token work is left.
    Source: LoRAServe, section IV, "Architecture Overview".
    """

    def __init__(self, table: Mapping[str, Iterable[tuple[int, float]]] | None = None) -> None:
        self.version = 0
        self._otherwise = LeastOutstanding()
        self._turns = _Turns(_checked(table or {}))

    @property
    def table(self) -> dict[str, list[tuple[int, float]]]:
        """A copy of what routes now."""
        return {adapter: list(row) for adapter, row in self._turns.table.items()}

    def swap(self, table: Mapping[str, Iterable[tuple[int, float]]]) -> None:
        """From the next request on route by this table; adapters whose row is the same go on in turn.

        One assignment, so a request sees the old table or the new one.  Raises ValueError for a share that is
        not positive or a row whose shares do not sum to 1; the table of before stays then.
        """
        turns = _Turns(_checked(table))
        before = self._turns
        for adapter, credit in before.credits.items():
            if turns.table.get(adapter) == before.table[adapter]:
                turns.credits[adapter] = credit
        self._turns = turns
        self.version += 1

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        turns = self._turns
        row = turns.table.get(request.adapter) if request.adapter is not None else None
        if row is None or request.adapter is None:
            return self._otherwise.choose(request, instances)
        there = {one.index: one for one in instances}
        row = tuple((index, phi) for index, phi in row if index in there)
        if not row:
            return self._otherwise.choose(request, instances)
        credit = turns.credits.setdefault(request.adapter, {})
        total = math.fsum(phi for _, phi in row)
        for index, phi in row:
            credit[index] = credit.get(index, 0.0) + phi / total
        chosen, _ = max(row, key=lambda one: (round(credit[one[0]], 9), one[1], -one[0]))
        credit[chosen] -= 1.0
        return there[chosen]


def _checked(table: Mapping[str, Iterable[tuple[int, float]]]) -> dict[str, _Row]:
    found = {}
    for adapter, given in table.items():
        row = tuple((int(index), float(phi)) for index, phi in given)
        if not all(phi > 0 for _, phi in row) or not math.isclose(sum(p for _, p in row), 1.0, rel_tol=1e-6):
            raise ValueError(f"routing of adapter {adapter!r} is {row}; shares must be positive and sum to 1")
        if len({index for index, _ in row}) != len(row):
            raise ValueError(f"routing of adapter {adapter!r} is {row}; name each instance once")
        found[adapter] = row
    return found
