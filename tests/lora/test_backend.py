# SPDX-License-Identifier: Apache-2.0
"""The base of all backends: a backend states only its deltas."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch

from moe_lora.lora.backend import AddTo, LoraBackend


class Counting(LoraBackend):
    """Adds how often its rows were made."""

    num_made = 0

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        return self._once(self._rows, site)

    def _rows(self, site: int) -> AddTo:
        self.num_made += 1
        num_made = self.num_made
        return lambda y: y.add_(num_made)


def test_backend_without_more_than_deltas_follows_steps_and_computes_nothing_else():
    backend = Counting()
    backend.abandon_step()
    backend.begin_step(SimpleNamespace(), SimpleNamespace())
    x = torch.zeros(1)
    assert backend.rows_here(0, 0) is None
    assert backend.rows_to_sort(0, 0, x, x) is None
    backend.abandon_step()


def test_rows_are_made_once_a_step():
    backend = Counting()
    for num_made in (1, 2):
        backend.begin_step(SimpleNamespace(), SimpleNamespace())
        begun = [backend.begin(layer, 0, torch.zeros(1), None) for layer in range(3)]
        assert backend.num_made == num_made
        assert begun[0] is begun[1] is begun[2]
        backend.abandon_step()


def test_backend_goes_with_its_last_reference():
    """A merged adapter's backend holds matrices beside the arena: they must not wait for a collection."""
    backend = Counting()
    backend.begin_step(SimpleNamespace(), SimpleNamespace())
    backend.begin(0, 0, torch.zeros(1), None)
    gone = weakref.ref(backend)
    gc.disable()
    try:
        del backend
        assert gone() is None
    finally:
        gc.enable()
