"""The requests that wait for an instance, and which of them admission has to look at."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, islice

from moe_lora.policies.admission import shortest_first

from .requests import SimRequest


class WaitingRequests:
    """First come first served, or shortest first.

    While nothing has fallen free since a whole scan, those that it turned away can't start, and only newer
    ones are looked at, after the oldest, whose starvation would stop them: what a scan of all would decide.
    """

    def __init__(self, *, shortest_first: bool) -> None:
        self._shortest_first = shortest_first
        self._refused: dict[int, SimRequest] = {}
        self._new: dict[int, SimRequest] = {}
        self._freed = False
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._refused) + len(self._new)

    def add(self, request: SimRequest) -> None:
        request.num_steps_before = self._num_steps
        self._new[request.index] = request

    def freed(self) -> None:
        """Those turned away may find room now."""
        self._freed = True

    def next_step(self) -> None:
        """A step begins, whether or not there is room for further requests."""
        self._num_steps += 1

    def candidates(self) -> Iterable[SimRequest]:
        """What to scan now; followed by `scanned`."""
        if self._shortest_first:
            return shortest_first(chain(self._refused.values(), self._new.values()))
        if self._freed:
            return [*self._refused.values(), *self._new.values()]
        if not self._new:
            return ()
        return [*islice(self._refused.values(), 1), *self._new.values()]

    def scanned(
        self, started: Iterable[SimRequest], turned_away: Collection[int | None], *, whole: bool
    ) -> None:
        """These of the candidates have started.  whole: none of the others wants anything but its adapter.

        turned_away: uids of adapters that got no slot.
        """
        for request in started:
            request.at_once = self._num_steps == request.num_steps_before + 1
            if self._new.pop(request.index, None) is None:
                del self._refused[request.index]
        for request in self._new.values():
            request.waited_for_adapter = whole or request.adapter_uid in turned_away
        self._refused.update(self._new)
        self._new.clear()
        self._freed = not whole
