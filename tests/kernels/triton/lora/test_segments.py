# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_lora.kernels.lora import SharedSegments
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.kernels.triton.lora import segments
from tests.kernels.kernel_cases import GATE_UP, QKV


def described_rows(token_slots, ids) -> list[tuple[int, int, int]]:
    """(expert, slot, row) of each row with an adapter, in the order that segments promise."""
    top_k = 1 if ids is None else ids.shape[1]
    slots = [int(slot) for slot in token_slots for _ in range(top_k)]
    experts = [0] * len(slots) if ids is None else ids.flatten().tolist()
    return sorted(
        (expert, slot, row)
        for row, (slot, expert) in enumerate(zip(slots, experts, strict=True))
        if slot >= 0 and expert >= 0
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.lists(st.integers(-1, 3), max_size=40),
    top_k=st.integers(0, 3),
    tile_rows=st.sampled_from([1, 2, 16]),
    by_torch=st.booleans(),
    cut_at_once=st.booleans(),
    seed=st.integers(0, 99),
)
def test_segments_are_a_sorted_permutation_cut_into_tiles(
    device, slots, top_k, tile_rows, by_torch, cut_at_once, seed
):
    token_slots = torch.tensor(slots, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 3, (len(slots), top_k), generator=generator).int().to(device) if top_k else None
    limit = segments.SORT_MAX_ROWS
    try:
        segments.SORT_MAX_ROWS = 0 if by_torch else limit
        zeros = segments.Zeros() if cut_at_once else None
        built = segments.build_segments(token_slots, ids, 4, 3 if top_k else 0, tile_rows, zeros)
    finally:
        segments.SORT_MAX_ROWS = limit
    expected, count = described_rows(token_slots, ids), int(built.count)
    rows = built.rows.tolist()
    assert sorted(rows) == list(range(len(slots) * max(1, top_k)))
    found = [(expert, slot) for _, _, slot, expert in built.described.tolist()]
    assert [(*pair, row) for pair, row in zip(found, rows, strict=True)][:count] == expected
    assert found[count:] == [(-1, -1)] * (len(rows) - count)
    tiles = built.tiles(tile_rows)
    place = 0
    for first, end, slot, expert in tiles.table[: int(tiles.num)].tolist():
        assert first == place < end <= first + tile_rows
        assert found[first:end] == [(expert, slot)] * (end - first)
        place = end
        # A tile ends where it is full or its segment ends.
        assert end - first == tile_rows or end == count or found[end] != (expert, slot)
    assert place == count


def test_slots_and_experts_outside_the_tables_count_as_none(device):
    token_slots = torch.tensor([0, 7, -5], dtype=torch.int32, device=device)
    ids = torch.tensor([[0, 9], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    built = segments.build_segments(token_slots, ids, 4, 3)
    assert int(built.count) == 1
    assert int(built.rows[0]) == 0
    unsorted = segments.unsorted_rows(token_slots, ids, 4, 3)
    assert unsorted.described[:, 2:].tolist() == [[0, 0]] + [[-1, -1]] * 5
    assert segments.unsorted_rows(token_slots, None, 4, 0).described[:, 2].tolist() == [0, -1, -1]


def test_wrong_shapes_and_dtypes_are_refused(device):
    token_slots = torch.zeros(4, dtype=torch.int32, device=device)
    for slots, ids in [
        (token_slots.long(), None),
        (token_slots[::2], None),
        (token_slots, token_slots),
        (token_slots, token_slots[:2, None]),
        (token_slots, token_slots[:, None].float()),
    ]:
        with pytest.raises(ValueError):
            segments.build_segments(slots, ids, 4, 1)


def test_order_is_shared_by_sites_of_the_same_rows_only(device):
    token_slots = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32, device=device)
    shared, x = SharedSegments(), torch.zeros(3, 1, dtype=torch.bfloat16, device=device)

    def of(layer, ids):
        site, slots = QKV if ids is None else GATE_UP, SlotTable(2, 2, 1, device)
        return shared.of(LoraOperands(x, ids, site, layer, token_slots, slots, token_slots), "sgmv")

    dense, experts = of(0, None), of(0, ids)
    assert of(1, None) is dense
    assert of(0, ids) is experts
    assert of(1, ids) is not experts
    # Another tensor in the memory that ids had, as an allocator may hand out.
    other = ids[:]
    ids.copy_(ids.flip(1))
    assert of(0, other) is not experts
    assert of(0, other).rows.tolist() != experts.rows.tolist()
