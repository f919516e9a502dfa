# SPDX-License-Identifier: Apache-2.0
"""The interface of LoRA backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from moe_lora.kernels.cpu.site_linear import NO_ROWS, LoraRows
from moe_lora.kernels.operands import StepTables

from .row_routing import RowRouting

if TYPE_CHECKING:
    from moe_lora.kernels.triton.lora.segments import RowsToSort

AddTo: TypeAlias = Callable[[torch.Tensor], None]
"""Adds one site's deltas to y: [T or T*K, sum of out_features], in the model's dtype or fp32."""


Made = TypeVar("Made")


class LoraBackend(ABC):
    """Computes y += delta for a step's rows.

    Per site: `add_to = begin(...)`, base GEMM into y, `add_to(y)`; on CPU one library call with `rows_here`.
    """

    _step: StepTables
    _routing: RowRouting
    _made: dict[tuple[Any, ...], Any]

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """Set the batch of the following sites."""
        self._step, self._routing, self._made = step, routing, {}

    def _once(self, make: Callable[..., Made], *place: int) -> Made:
        """make(*place), called once a step."""
        key = make.__name__, *place  # a bound method, a cycle, would keep arenas alive
        if key not in self._made:
            self._made[key] = make(*place)
        made: Made = self._made[key]
        return made

    @abstractmethod
    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        """Start one site's deltas; None without deltas.

        x: [T, d_in], or [T*K, d_in] with a row per expert; unchanged until `add_to`.  ids: [T, K] int32
        experts, numbered in the whole model, -1 for padding and other ranks' experts; None at a dense site.
        """

    def rows_here(self, layer: int, site: int) -> LoraRows | None:
        """The CPU library's operands for deltas with their base layer; None: use `begin`.

        With equal routing in all layers, layer 0's answer holds for every layer.
        """
        return None

    def rows_to_sort(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor) -> RowsToSort | None:
        """Rows to sort in the launch that chooses experts, before `begin` (CUDA only).

        x: any of the site's dtype and device.  None: nothing to sort here.
        """
        return None

    def abandon_step(self) -> None:  # noqa: B027
        """Drop a failed step, if any: no later step gets its answers."""


class OuterBackend(LoraBackend):
    """LoraBackend around another."""

    def __init__(self, inner: LoraBackend) -> None:
        self.inner = inner

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        self.inner.begin_step(step, routing)

    def abandon_step(self) -> None:
        self.inner.abandon_step()


class RoutedBackend(LoraBackend):
    """LoraBackend that sends each row, at each site, to its source's backend.

    backends: in the order of `begin`, remote first; a negated source has the subtracting backend.  Sites with
    subtracted terms sum a row's terms in fp32 and round once.  present: [slots, layers] bool, layers on this
    device; None: no HOST source.  num_taken_over: HOST rows computed here, once per layer.
    """

    def __init__(self, backends: Mapping[int, LoraBackend], present: np.ndarray | None = None) -> None:
        self.backends = dict(backends)
        self.num_taken_over = 0
        self._present = present
        self._groups: Sequence[Sequence[int]] = ()
        self._chosen: list[list[LoraBackend]] = []
        self._subtracts: list[bool] = []
        self._loading: _LoadingRows | None = None

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        self._loading = None
        if self._present is not None and routing.loading.any():
            self._loading = _LoadingRows(step, routing)
        self._begin_step(step, routing)

    def _begin_step(self, step: StepTables, routing: RowRouting) -> None:
        self._groups = routing.groups
        self._chosen = [
            [backend for source, backend in self.backends.items() if source in sources]
            for sources in routing.sources
        ]
        self._subtracts = [min(sources, default=0) < 0 for sources in routing.sources]
        for source in set().union(*routing.sources):
            self.backends[source].begin_step(step, routing)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        if self._loading is not None and layer != self._loading.layer:
            self._choose_sources(layer, self._loading)
        group = self._groups[layer][site]
        chosen = self._chosen[group]
        if len(chosen) == 1 and not self._subtracts[group]:
            return chosen[0].begin(layer, site, x, ids)
        begun = [backend.begin(layer, site, x, ids) for backend in chosen]
        if not begun:
            return None
        return partial(_add_sum if self._subtracts[group] else _add_all, begun)

    def rows_here(self, layer: int, site: int) -> LoraRows | None:
        if self._loading is not None:
            return None
        group = self._groups[layer][site]
        chosen = self._chosen[group]
        if not chosen:
            return NO_ROWS
        return None if len(chosen) > 1 or self._subtracts[group] else chosen[0].rows_here(layer, site)

    def rows_to_sort(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor) -> RowsToSort | None:
        chosen = self._chosen[self._groups[layer][site]]
        one_alone = len(chosen) == 1 and self._loading is None
        return chosen[0].rows_to_sort(layer, site, x, ids) if one_alone else None

    def abandon_step(self) -> None:
        self._loading = None
        for backend in self.backends.values():
            backend.abandon_step()

    def _choose_sources(self, layer: int, loading: _LoadingRows) -> None:
        assert self._present is not None
        here = loading.routing.here
        routes = [
            route
            for route, slot in loading.slots.items()
            if (self._present[slot, layer] if here is None else here[route, layer])
        ]
        if routes != loading.here:
            self._begin_step(loading.step, loading.routing.taken_over(routes))
        loading.layer, loading.here = layer, routes
        self.num_taken_over += sum(loading.num_rows[route] for route in routes)


class _LoadingRows:
    """A step's rows with loading adapters.  here: routes computed here."""

    def __init__(self, step: StepTables, routing: RowRouting) -> None:
        self.step = step
        self.routing = routing
        self.slots = routing.loading_slots
        self.num_rows = np.bincount(routing.row_route + 1, minlength=len(routing.terms))[1:].tolist()
        self.here: list[int] = []
        self.layer = -1


def _add_all(begun: Sequence[AddTo | None], y: torch.Tensor) -> None:
    for add_to in begun:
        if add_to is not None:
            add_to(y)


def _add_sum(begun: Sequence[AddTo | None], y: torch.Tensor) -> None:
    """Adds the sum at once: subtracted terms must not be rounded first."""
    total = torch.zeros_like(y, dtype=torch.float32)
    _add_all(begun, total)
    y.add_(total)
