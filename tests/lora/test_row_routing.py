# SPDX-License-Identifier: Apache-2.0
"""The table that says where each row's deltas are computed, and steps whose rows go different ways."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lora.kernels.operands import StepTables
from moe_lora.lora.backend import LoraBackend, RoutedBackend
from moe_lora.lora.row_routing import RowRouting, Source, no_terms

GROUPS = ((0, 1), (0, 1))


def route(*terms: tuple[Source, int] | None) -> RowRouting:
    """Rows: base, the one route, base.  terms: source and slot at each group."""
    table = no_terms(1, len(terms))
    for group, term in enumerate(terms):
        if term is not None:
            table[0, group, 0] = (term[0], 0, term[1], 0)
    return RowRouting(groups=GROUPS, row_route=np.array([-1, 0, -1], dtype=np.int32), terms=table)


def test_row_has_a_source_at_each_group_of_sites():
    routing = route((Source.LOCAL, 3), (Source.LEASED, 5))
    assert routing.sources == [{Source.LOCAL}, {Source.LEASED}]
    assert routing.terms_from(Source.LOCAL, 0)["slot"].tolist() == [-1, 3, -1]
    assert routing.terms_from(Source.LEASED, 1)["slot"].tolist() == [-1, 5, -1]


def test_terms_of_other_sources_are_left_out():
    routing = route((Source.LOCAL, 3), None)
    assert routing.terms_from(Source.LEASED, 0)["slot"].tolist() == [-1, -1, -1]
    assert routing.terms_from(Source.LEASED, 0)["adapter"].tolist() == [-1, -1, -1]
    assert routing.sources[1] == set()


def test_step_of_the_base_model_has_no_deltas():
    rows = np.full(4, -1, dtype=np.int32)
    routing = RowRouting(groups=GROUPS, row_route=rows, terms=no_terms(0, 2))
    assert not routing.has_deltas
    assert routing.sources == [set(), set()]
    assert route((Source.LOCAL, 0), None).has_deltas


class Noting(LoraBackend):
    """A backend that adds its number to the first element of y."""

    def __init__(self, number: float) -> None:
        self.number, self.num_steps, self.num_abandoned = number, 0, 0

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        self.num_steps += 1

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None):
        return lambda y: y[0].add_(self.number)

    def abandon_step(self) -> None:
        self.num_abandoned += 1


def test_abandoned_step_is_abandoned_by_every_backend():
    local, leased = Noting(1.0), Noting(10.0)
    routed = RoutedBackend({Source.LOCAL: local, Source.LEASED: leased})
    routed.begin_step(None, route((Source.LOCAL, 0), (Source.LEASED, 0)))
    routed.begin(0, 0, torch.zeros(3, 1), None)
    routed.abandon_step()
    assert (local.num_abandoned, leased.num_abandoned) == (1, 1)


def test_site_is_begun_at_the_backends_of_its_rows_only():
    local, leased = Noting(1.0), Noting(10.0)
    backend = RoutedBackend({Source.LEASED: leased, Source.LOCAL: local})

    def added(routing: RowRouting, site: int) -> float:
        backend.begin_step(SimpleNamespace(), routing)
        add_to, y = backend.begin(0, site, torch.zeros(3), None), torch.zeros(3)
        if add_to is not None:
            add_to(y)
        return float(y[0])

    both = route((Source.LOCAL, 0), (Source.LEASED, 0))
    assert (added(both, 0), added(both, 1)) == (1.0, 10.0)
    assert (added(route(None, None), 0), added(route((Source.LOCAL, 0), None), 1)) == (0.0, 0.0)
    assert (local.num_steps, leased.num_steps) == (3, 2), "a backend without rows is not told of the step"


def test_terms_that_no_backend_computes_are_refused():
    backend = RoutedBackend({Source.LOCAL: Noting(1.0)})
    subtracted = route((Source.LOCAL, 0), None)
    subtracted.terms["source"] *= -1
    for routing in (route((Source.LEASED, 0), None), subtracted):
        with pytest.raises(KeyError):
            backend.begin_step(SimpleNamespace(), routing)


@pytest.mark.parametrize(
    ("here", "from_host"), [(None, [0.0, 1.0]), ([[True, False]], [0.0, 1.0]), ([[False, True]], [1.0, 0.0])]
)
def test_first_rank_decides_what_of_a_loading_adapter_hosts_compute(here, from_host):
    """Where it said nothing: what is not there when it begins."""
    routing = replace(route((Source.HOST, 3), None), here=None if here is None else np.array(here))
    present = np.zeros((4, 2), dtype=bool)
    present[3, 0] = True
    backend = RoutedBackend({Source.HOST: Noting(1.0), Source.LOCAL: Noting(0.0)}, present)
    backend.begin_step(SimpleNamespace(), routing)
    found = []
    for layer in range(2):
        y = torch.zeros(3, 1)
        backend.begin(layer, 0, torch.zeros(3, 1), None)(y)
        found.append(y[0, 0].item())
    assert found == from_host
    assert backend.num_taken_over == 1


def test_terms_of_a_row_are_summed_before_they_are_rounded():
    """1 + 2^-9 - 1 is lost in bf16 where it is rounded in between."""
    table = no_terms(1, 1, 2)
    table["source"][0, 0] = (Source.LOCAL, -Source.LOCAL)
    table["slot"][0, 0] = (3, 5)
    routing = RowRouting(groups=((0,),), row_route=np.array([0, -1], dtype=np.int32), terms=table)
    assert routing.sources == [{Source.LOCAL, -Source.LOCAL}]
    assert routing.terms_from(-Source.LOCAL, 0)["slot"].tolist() == [5, -1]
    backend = RoutedBackend({Source.LOCAL: Noting(1 + 2.0**-9), -Source.LOCAL: Noting(-1.0)})
    backend.begin_step(SimpleNamespace(), routing)
    y = torch.zeros(2, 1, dtype=torch.bfloat16)
    backend.begin(0, 0, torch.zeros(2, 3), None)(y)
    assert y.tolist() == [[2.0**-9], [0.0]]
