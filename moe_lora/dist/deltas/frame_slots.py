# SPDX-License-Identifier: Apache-2.0
"""Frames between a device's stream and a host worker: slots that are used again, each counted for itself.

The k-th use of a slot is asked for when its request word is k, and answered when its answer word is k.  Words
only rise, so an answer that comes late changes nothing.  What is asked for and not answered is all that there
is to know: who serves keeps nothing, and another may go on where it ended.  A worker that can't compute a use
raises the slot's refusal word to k, and the engine answers.
The words are memory that the device reads and writes itself, in the order of its stream; it rings no bell, so
who serves looks again and again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_lora.dist.transport.contract import Window
from moe_lora.dist.transport.shm import ShmRemoteWindow
from moe_lora.dist.transport.shm_library import SignalWaiter, SignalWords, lines

from .session import DONE, DeltaRequest, FrameLayout, answer_rows, read_request

SPIN_S, FIRST_SLEEP_S, LONGEST_SLEEP_S = 1e-3, 50e-6, 1e-3
"""A worker spins for about a layer's time, then sleeps between looks, longer and longer."""

Compute = Callable[[DeltaRequest, torch.Tensor], int]
"""Fills the deltas [R, N] of a request; the answer's state."""


class FrameSlots:
    """The slots of one worker, as the engine or the worker has them mapped.

    requests: `depth` frames and as many words.  answers: `depth` frames, as many words, as many refusals.
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
        self.request_frames = list(_bytes(requests).view(depth, layout.request_bytes))
        self.answer_frames = list(_bytes(answers).view(depth, layout.answer_bytes))
        self._requests = requests
        self._first = 0
        bell = lines(1)
        self._spinning, self._sleeping = SignalWaiter(bell, SPIN_S), SignalWaiter(bell, 0.0)

    def pending(self) -> int | None:
        """A slot with a use that was neither answered nor refused; those come first that were not served."""
        return self._first_with(lambda slot: max(self._answered(slot), self._refused(slot)), self._asked)

    def unanswered(self) -> int | None:
        """The same, refused or not."""
        return self._first_with(self._answered, self._asked)

    def refused(self) -> int | None:
        """A slot whose worker has refused a use that is not answered."""
        return self._first_with(self._answered, self._refused)

    def uses(self) -> list[int]:
        """Of each slot the use that is not answered, 0 where there is none."""
        return [
            self._asked(slot) if self._asked(slot) > self._answered(slot) else 0 for slot in range(self.depth)
        ]

    def serve(self, slot: int, compute: Compute) -> None:
        """Answer the slot's pending use, or refuse it if `compute` can't.

        One thread of one process at a time serves: the frame of the answer is written in place.
        """
        use = self._asked(slot)
        request = read_request(self.request_frames[slot], self.layout)
        out = answer_rows(self.answer_frames[slot], self.layout, request.site, request.num_rows)
        done = compute(request, out) == DONE
        self.answer_words.raise_to(slot if done else self.depth + slot, use)
        self._first = (slot + 1) % self.depth

    def wait(self) -> int:
        """A pending slot, as soon as there is one."""
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


def _bytes(window: Window | ShmRemoteWindow) -> torch.Tensor:
    if isinstance(window, Window):
        return window.bytes
    found = window.view(0, window.num_bytes)
    assert found is not None
    return found
