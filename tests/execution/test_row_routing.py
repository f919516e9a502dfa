"""The table that says where each row's deltas are computed, and steps whose rows go different ways."""

from __future__ import annotations

import numpy as np

from moe_lora.execution.row_routing import RowRouting, Source, no_terms

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
