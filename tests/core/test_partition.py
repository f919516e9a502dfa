# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout, Partition
from tests.dist.lora_server.shapes import model_shape

QKV, ATTN_O, ROUTER, GATE_UP, DOWN = range(5)


def partition(layout: str, client_ranks: int = 2, num_experts: int = 8, num_layers: int = 4) -> Partition:
    return Partition(model_shape(num_experts, num_layers), Layout.parse(layout), client_ranks)


@pytest.mark.parametrize(
    ("text", "ep", "pp", "dp", "canonical"),
    [
        ("EP2-PP1", 2, 1, 1, "EP2-PP1"),
        ("EP16-PP3", 16, 3, 1, "EP16-PP3"),
        ("EP4", 4, 1, 1, "EP4-PP1"),
        ("PP4", 1, 4, 1, "EP1-PP4"),
        ("DP4", 1, 1, 4, "DP4"),
    ],
)
def test_layout_is_read_and_written(text, ep, pp, dp, canonical):
    layout = Layout.parse(text)
    assert layout == Layout(ep=ep, pp=pp, dp=dp)
    assert str(layout) == canonical
    assert Layout.parse(canonical) == layout
    assert layout.num_ranks == ep * pp * dp


@pytest.mark.parametrize(
    "text", ["", "EP", "EP0-PP1", "EP2-", "-PP2", "EP2PP2", "DP2-PP2", "ep2-pp1", "EP2-PP1 "]
)
def test_text_that_is_no_layout_is_refused(text):
    with pytest.raises(ConfigError, match=r"lora_server='.*' is no layout; choose EPx-PPy"):
        Layout.parse(text)


def test_mixed_layout_is_refused():
    with pytest.raises(ConfigError, match="ep=2, pp=1, dp=2 is no layout"):
        Layout(ep=2, dp=2)


def test_ep2_pp2_as_in_figure_8d():
    part = partition("EP2-PP2")
    assert [part.stage_of(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert [part.stage_leader(stage) for stage in range(2)] == [0, 2]
    assert [list(part.layers_of(rank)) for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert [part.experts_of(rank) for rank in range(4)] == [range(4), range(4, 8)] * 2
    assert [part.owner(0, GATE_UP, expert) for expert in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [part.owner(3, DOWN, expert) for expert in range(8)] == [2, 2, 2, 2, 3, 3, 3, 3]
    assert [part.owner(1, site) for site in (QKV, ATTN_O, ROUTER)] == [2, 3, 2]


def test_a_client_talks_to_the_servers_whose_experts_it_has():
    wide = partition("EP4-PP1", client_ranks=2)
    assert [wide.servers_of_client(client, 0, GATE_UP) for client in range(2)] == [(0, 1), (2, 3)]
    assert [wide.clients_of_server(rank, GATE_UP) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    narrow = partition("EP2-PP2", client_ranks=4)
    assert [narrow.servers_of_client(client, 1, DOWN) for client in range(4)] == [(2,), (2,), (3,), (3,)]
    assert [narrow.clients_of_server(rank, DOWN) for rank in range(4)] == [(0, 1), (2, 3)] * 2


def test_every_client_talks_to_the_owner_of_a_dense_site():
    part = partition("EP4-PP1", client_ranks=2)
    assert [part.servers_of_client(client, 0, ATTN_O) for client in range(2)] == [(1,), (1,)]
    assert [part.clients_of_server(rank) for rank in range(4)] == [(0, 1), (0, 1), (0, 1), (1,)]


def test_dense_model_spreads_its_sites():
    part = partition("EP2-PP1", client_ranks=1, num_experts=0)
    assert [part.owner(0, site) for site in range(4)] == [0, 1, 0, 1]
    assert [len(part.experts_of(rank)) for rank in range(2)] == [0, 0]
    assert len(part.local_experts(0)) == 0


def test_data_parallel_owner_depends_on_the_slot_alone():
    part = partition("DP4")
    assert [part.owner(layer, GATE_UP, 5, slot=6) for layer in range(4)] == [2, 2, 2, 2]
    assert part.owner(3, QKV, slot=6) == 2
    assert part.servers_of_client(1, 0, DOWN) == (0, 1, 2, 3)
    assert part.clients_of_server(3) == (0, 1)
    assert [part.experts_of(rank) for rank in range(4)] == [range(8)] * 4
    assert [part.layers_of(rank) for rank in range(4)] == [range(4)] * 4
    with pytest.raises(AssertionError, match="depends on the adapter's slot"):
        part.owner(0, QKV)


def test_an_expert_is_named_at_expert_sites_only():
    for site, expert in ((GATE_UP, None), (QKV, 0)):
        with pytest.raises(AssertionError, match="only there"):
            partition("EP2-PP1").owner(0, site, expert)


@pytest.mark.parametrize(
    ("layout", "client_ranks", "num_experts", "message"),
    [
        ("EP3-PP1", 1, 8, r"lora_server='EP3-PP1': 3 does not divide num_experts=8; choose 1, 2, 4 or 8"),
        ("EP16-PP1", 1, 8, r"16 does not divide num_experts=8"),
        ("EP1-PP5", 1, 8, r"'EP1-PP5': 5 stages are more than num_layers=4; choose 1 to 4"),
        ("EP2-PP1", 3, 8, r"expert_parallel=3: 3 does not divide num_experts=8; choose 1, 2, 4 or 8"),
        ("EP2-PP1", 0, 8, r"expert_parallel=0 must be 1 or more"),
        ("EP4-PP1", 6, 12, r"'EP4-PP1': .* \(expert_parallel=6\) .*; choose EP 1, 2, 3, 6 or 12"),
        ("EP5-PP1", 1, 0, r"'EP5-PP1': a model without experts has 4 LoRA sites .*; choose 1 to 4"),
    ],
)
def test_layout_that_does_not_fit_the_model_is_refused(layout, client_ranks, num_experts, message):
    with pytest.raises(ConfigError, match=message):
        partition(layout, client_ranks, num_experts)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    num_experts = draw(st.sampled_from([4, 6, 8, 12, 16]))
    divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    ep = draw(st.sampled_from(divisors))
    clients = draw(st.sampled_from([n for n in divisors if n % ep == 0 or ep % n == 0]))
    num_layers = draw(st.integers(1, 9))
    layout = Layout(ep=ep, pp=draw(st.integers(1, num_layers)))
    if draw(st.booleans()):
        layout = Layout(dp=draw(st.integers(1, 6)))
    return Partition(model_shape(num_experts, num_layers), layout, clients)


@settings(deadline=None)
@given(partitions(), st.integers(0, 20))
def test_owner_experts_layers_and_peers_agree(part: Partition, slot: int):
    shape = part.shape
    heard = [part.clients_of_server(rank) for rank in range(part.layout.num_ranks)]
    for layer in range(shape.num_layers):
        workers = part.ranks_of_stage(part.stage_of(layer))
        assert workers[0] == part.stage_leader(part.stage_of(layer))
        for index, site in enumerate(shape.sites):
            for client in range(part.client_ranks):
                experts = part.local_experts(client) if site.num_experts else [None]
                for expert in experts:
                    rank = part.owner(layer, index, expert, slot=slot)
                    assert rank in workers
                    assert layer in part.layers_of(rank)
                    assert expert is None or expert in part.experts_of(rank)
                    assert rank in part.servers_of_client(client, layer, index)
                    assert client in part.clients_of_server(rank, index)
                    assert client in heard[rank]
    ranks = range(part.layout.num_ranks)
    assert sum(len(part.layers_of(rank)) * len(part.experts_of(rank)) for rank in ranks) == (
        shape.num_layers * shape.num_experts * part.layout.dp
    )


@settings(deadline=None)
@given(partitions())
def test_a_client_talks_to_one_server_or_a_server_hears_one_client(part: Partition):
    """Aligned expert ranges never overlap in part."""
    if part.layout.dp == 1:
        for client in range(part.client_ranks):
            for rank in part.servers_of_client(client, 0, GATE_UP):
                one, other = set(part.local_experts(client)), set(part.experts_of(rank))
                assert one <= other or other <= one


def test_the_servers_decisions_start_without_torch():
    code = (
        "import sys, moe_lora.core.partition, moe_lora.cache.leases.leases;assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
