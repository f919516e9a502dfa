# SPDX-License-Identifier: Apache-2.0
"""A rank that follows copies beside its steps, and waits where rank 0 relies on what it copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moe_lora.engine.ranks.follower import FollowerCopies
from moe_lora.engine.ranks.followers import OrdersDone
from moe_lora.lora.row_routing import RowRouting, Source, no_terms

NUM_LAYERS = 3


class LateMover:
    """Does one piece of its copies each second time that it is asked what is done."""

    def __init__(self) -> None:
        self._orders: list[tuple[int, Iterator[int]]] = []
        self._num_asked = 0

    def submit(self, number: int, steps: Iterator[int]) -> None:
        self._orders.append((number, steps))

    def finished(self) -> list[tuple[int, Exception | None]]:
        self._num_asked += 1
        if self._num_asked % 2 or not self._orders:
            return []
        number, steps = self._orders[0]
        try:
            next(steps)
            return []
        except StopIteration:
            done: tuple[int, Exception | None] = number, None
        except OSError as error:
            done = number, error
        del self._orders[0]
        return [done]


class Slots:
    """Copies layers in this order into a slot each."""

    def __init__(self) -> None:
        self.present = np.zeros((2, NUM_LAYERS), dtype=bool)
        self.copies = FollowerCopies(LateMover(), self.present)

    def bring(self, slot: int, layers: tuple[int, ...], fails: bool = False) -> Iterator[int]:
        for layer in layers:
            yield 1
            if fails:
                raise OSError("the disk is gone")
            self.present[slot, layer] = True

    def there(self, slot: int) -> list[int]:
        return np.flatnonzero(self.present[slot]).tolist()


def routing(slot: int, here: tuple[int, ...]) -> RowRouting:
    """A row of an adapter that is on its way to the slot; rank 0 has these layers."""
    terms = no_terms(1, 1)
    terms[0, 0, 0] = (Source.HOST, 0, slot, 7)
    rows = np.zeros(1, dtype=np.int32)
    found = RowRouting(groups=((0,),) * NUM_LAYERS, row_route=rows, terms=terms)
    return replace(found, here=np.isin(range(NUM_LAYERS), here)[None])


def test_step_waits_for_layers_that_rank_0_computes_on_its_device_and_for_no_others():
    slots = Slots()
    slots.copies.begin(1, slots.bring(0, (1, 2, 0)))
    slots.copies.wait_for_layers(routing(0, ()))
    assert slots.there(0) == []
    slots.copies.wait_for_layers(routing(0, (1,)))
    assert slots.there(0) == [1]
    slots.copies.wait_for_layers(replace(routing(0, ()), here=None))
    slots.copies.wait_for_layers(routing(0, (1, 2)))
    assert slots.there(0) == [1, 2]


def test_what_rank_0_has_done_is_waited_for():
    slots = Slots()
    slots.copies.begin(1, slots.bring(0, (1, 2, 0)))
    slots.copies.begin(2, slots.bring(1, (1, 2, 0)))
    slots.copies.wait_for(OrdersDone((1,)))
    assert slots.there(0) == [0, 1, 2]
    assert slots.there(1) == []


def test_copy_that_fails_here_alone_ends_the_rank():
    slots = Slots()
    slots.copies.begin(1, slots.bring(0, (1,), fails=True))
    slots.copies.wait_for(OrdersDone((1,), failed=(1,)))
    slots.copies.begin(2, slots.bring(0, (1,), fails=True))
    with pytest.raises(OSError, match="the disk is gone"):
        slots.copies.wait_for(OrdersDone((2,)))
    slots.copies.begin(3, slots.bring(0, (1,), fails=True))
    with pytest.raises(OSError, match="the disk is gone"):
        slots.copies.wait_for_layers(routing(0, (1,)))


def test_copy_of_another_adapter_that_fails_does_not_end_a_step_that_waits():
    slots = Slots()
    slots.copies.begin(1, slots.bring(0, (1,), fails=True))
    slots.copies.begin(2, slots.bring(1, (1, 2, 0)))
    slots.copies.wait_for_layers(routing(1, (1, 2)))
    assert slots.there(1) == [1, 2]
    slots.copies.wait_for(OrdersDone((1, 2), failed=(1,)))
    assert slots.there(1) == [0, 1, 2]
