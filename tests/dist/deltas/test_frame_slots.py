# SPDX-License-Identifier: Apache-2.0
"""Slots of frames: any order of asking, serving, refusing, taking over and answering late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.dist.deltas.frame_slots import FrameSlots
from moe_lora.dist.deltas.session import DONE, STALE, FrameLayout, answer_rows, lay_out_request
from moe_lora.dist.transport.shm import ShmTransport
from tests.dist.lora_server.shapes import model_shape

DEPTH = 3
SITE = 0


class Pair:
    """Both sides of slots in one process, and what a stream has asked for: x [1] = number of the use."""

    def __init__(self) -> None:
        self.layout = FrameLayout(model_shape(0), torch.float32, 1)
        self.engine = ShmTransport(name="engine")
        requests = self.engine.alloc("requests", DEPTH * self.layout.request_bytes, DEPTH)
        answers = self.engine.alloc("answers", DEPTH * self.layout.answer_bytes, 2 * DEPTH)
        self.slots = FrameSlots(requests, answers, self.layout, DEPTH)
        self.worker = ShmTransport(name="worker")
        self.theirs = FrameSlots(
            self.worker.attach(requests.descriptor()),
            self.worker.attach(answers.descriptor()),
            self.layout,
            DEPTH,
        )

    def ask(self, slot: int, use: int) -> None:
        request = lay_out_request(self.slots.request_frames[slot], self.layout, 0, SITE, 1, 0, 1)
        request.x.fill_(use)
        self.slots.request_words.raise_to(slot, use)

    def answer(self, slot: int) -> float:
        return float(answer_rows(self.slots.answer_frames[slot], self.layout, SITE, 1)[0, 0])

    def close(self) -> None:
        self.worker.close()
        self.engine.close()


@pytest.fixture(scope="module")
def layout_pair():
    pair = Pair()
    yield pair
    pair.close()


def twice(request, out) -> int:
    out.fill_(2 * float(request.x[0, 0]))
    return DONE


def refuse(request, out) -> int:
    return STALE


ACTIONS = ("ask", "worker", "refuse", "engine", "late", "new worker")


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, DEPTH - 1)), max_size=60))
def test_every_use_is_answered_once_and_with_its_own_rows(actions):
    """A stream uses slots in any order, each again as soon as it was answered; a use has never the answer of
    another, and what nobody has answered is found by whoever serves next."""
    pair = Pair()
    try:
        uses = [0] * DEPTH
        owed: dict[int, int] = {}
        refused: set[int] = set()
        for action, place in actions:
            if action == "ask" and place not in owed:
                uses[place] += 1
                owed[place] = uses[place]
                pair.ask(place, uses[place])
            elif action in ("worker", "refuse"):
                slot = pair.theirs.pending()
                assert (slot is None) == (not owed.keys() - refused)
                if slot is not None:
                    pair.theirs.serve(slot, twice if action == "worker" else refuse)
                    refused |= {slot} if action == "refuse" else set()
            elif action == "engine":
                slot = pair.slots.unanswered()
                assert (slot is None) == (not owed)
                if slot is not None:
                    pair.slots.serve(slot, twice)
            elif action == "late" and uses[place]:
                pair.theirs.answer_words.raise_to(place, uses[place] - 1)
            elif action == "new worker":
                pair.theirs._first = 0
            for slot, use in list(owed.items()):
                if pair.slots.answer_words.read(slot) >= use:
                    assert pair.answer(slot) == 2 * use
                    del owed[slot]
                    refused.discard(slot)
            assert pair.slots.uses() == [owed.get(slot, 0) for slot in range(DEPTH)]
            assert (pair.slots.refused() is None) == (not refused)
    finally:
        pair.close()


def test_slots_are_served_in_the_order_they_are_asked_and_a_wait_ends_with_the_next(layout_pair):
    pair, order = layout_pair, []
    for use in (1, 2, 3):
        for slot in range(DEPTH):
            pair.ask(slot, use)
        for _ in range(DEPTH):
            order.append(pair.theirs.wait())
            pair.theirs.serve(order[-1], twice)
    assert order == 3 * list(range(DEPTH))
    assert pair.theirs.pending() is None
