# SPDX-License-Identifier: Apache-2.0
"""Frames between a device's stream and a host worker, in reused slots.

Request, answer and refusal words count a slot's uses, and only rise: late answers change nothing.  The engine
answers refused uses.  The device writes words without a doorbell, so servers poll.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_lora.dist.transport.contract import Window
from moe_lora.dist.transport.shm import ShmRemoteWindow
from moe_lora.dist.transport.shm_library import SignalWaiter, SignalWords, lines

from .session import DONE, DeltaRequest, FrameLayout, answer_rows, read_request

SPIN_S, FIRST_SLEEP_S, LONGEST_SLEEP_S = 1e-3, 50e-6, 1e-3
"""A worker spins for a layer's time, then sleeps ever longer."""

Compute = Callable[[DeltaRequest, torch.Tensor], int]
"""Fills deltas [R, N]; returns the answer's state."""


class FrameSlots:
    """One worker's slots, mapped in engine or worker.

    Both windows have `depth` frames and words; answers also refusal words.
    """

    def __init__(
        self,
        requests: Window | ShmRemoteWindow,
        answers: Window | ShmRemoteWindow,
        layout: FrameLayout,
        depth: int,
    ) -> None:
        self.depth = depth
        self.layout = layout
        self.request_words: SignalWords = requests.words
        self.answer_words: SignalWords = answers.words
        self.request_frames = _frames(requests, depth)
        self.answer_frames = _frames(answers, depth)
        self._requests = requests
        self._first = 0
        bell = lines(1)
        self._spinning, self._sleeping = SignalWaiter(bell, SPIN_S), SignalWaiter(bell, 0.0)

    def pending(self) -> int | None:
        """A slot with a use neither answered nor refused."""
        return self._first_with(lambda slot: max(self._answered(slot), self._refused(slot)), self._asked)

    def unanswered(self) -> int | None:
        """A slot with an unanswered use, refused or not."""
        return self._first_with(self._answered, self._asked)

    def refused(self) -> int | None:
        """A slot with a refused, unanswered use."""
        return self._first_with(self._answered, self._refused)

    def uses(self) -> list[int]:
        """Each slot's unanswered use, or 0."""
        return [
            self._asked(slot) if self._asked(slot) > self._answered(slot) else 0 for slot in range(self.depth)
        ]

    def serve(self, slot: int, compute: Compute) -> None:
        """Answer the slot's pending use in place, or refuse unless `compute` returns DONE.

        One thread serves at a time.
        """
        use = self._asked(slot)
        request = read_request(self.request_frames[slot], self.layout)
        out = answer_rows(self.answer_frames[slot], self.layout, request.site, request.num_rows)
        done = compute(request, out) == DONE
        self.answer_words.raise_to(slot if done else self.depth + slot, use)
        self._first = (slot + 1) % self.depth

    def serve_next(self, compute: Compute) -> None:
        """Wait for a pending slot, and serve."""
        self.serve(self.wait(), compute)

    def wait(self) -> int:
        """Wait for a pending slot."""
        sleep_s = 0.0
        while True:
            asked_again = [(self._requests, slot, self._asked(slot) + 1) for slot in range(self.depth)]
            slot = self.pending()
            if slot is not None:
                return slot
            waiter = self._sleeping if sleep_s else self._spinning
            waiter.any(asked_again, sleep_s or SPIN_S)
            sleep_s = min(max(2 * sleep_s, FIRST_SLEEP_S), LONGEST_SLEEP_S)

    def _first_with(self, below: Callable[[int], int], above: Callable[[int], int]) -> int | None:
        for number in range(self._first, self._first + self.depth):
            slot = number % self.depth
            if above(slot) > below(slot):
                return slot
        return None

    def _asked(self, slot: int) -> int:
        return self.request_words.read(slot)

    def _answered(self, slot: int) -> int:
        return self.answer_words.read(slot)

    def _refused(self, slot: int) -> int:
        return self.answer_words.read(self.depth + slot)


def _frames(window: Window | ShmRemoteWindow, depth: int) -> list[torch.Tensor]:
    memory = window.bytes if isinstance(window, Window) else window.view(0, window.num_bytes)
    assert memory is not None
    return list(memory.view(depth, -1))
