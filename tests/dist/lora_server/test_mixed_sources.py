# SPDX-License-Identifier: Apache-2.0
"""Rows whose deltas come from this device at some sites and from the LoRA Server at others, in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.shape import ModelShape, Site
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.row_routing import Lease, RoutedAdapter, RowRouting, Source, no_terms
from tests.families import make_adapter, make_checkpoint
from tests.models.harness import Harness

from .cluster import Cluster

NUM_TOKENS = 6
PROMPTS = [[5, 40, 7, 11], [9, 3], [5, 40, 7, 11], [33, 8, 60], [70, 4, 21, 90, 12], [33, 8, 60], [9, 3]]

Where = Callable[[int, Site], Source]


def local(layer: int, site: Site) -> Source:
    return Source.LOCAL


def leased(layer: int, site: Site) -> Source:
    return Source.LEASED


def experts_leased(layer: int, site: Site) -> Source:
    return Source.LEASED if site.num_experts else Source.LOCAL


def second_layer_leased(layer: int, site: Site) -> Source:
    return Source.LEASED if layer else Source.LOCAL


def every_other_leased(layer: int, site: Site) -> Source:
    return Source.LEASED if (layer + len(site.modules)) % 2 else Source.LOCAL


@dataclass(frozen=True)
class Route:
    """An adapter and where its deltas come from."""

    adapter: int
    where: Where


class RoutedHarness(Harness):
    """A harness in which a stream's slot is the number of its route; every site of every layer is a group."""

    def __init__(
        self,
        model_dir: Path,
        adapters: Sequence[Path],
        client: LoraServerClient,
        leases: Sequence[Lease | None],
        packed: Sequence[PackedAdapter],
        routes: Sequence[Route],
    ) -> None:
        super().__init__(model_dir, adapters, max_sequences=8)
        backends = {Source.LEASED: client.backend, Source.LOCAL: self.context.backend}
        self.context.backend = RoutedBackend(backends)
        self.groups = groups_of(self.model.spec.shape)
        self._adapters = [RoutedAdapter(p.content_hash, p.targets) for p in packed]
        self.terms = no_terms(len(routes), sum(map(len, self.groups)))
        for number, route in enumerate(routes):
            for layer, groups in enumerate(self.groups):
                for site, group in zip(self.model.spec.shape.sites, groups, strict=True):
                    source = route.where(layer, site)
                    slot, generation = route.adapter, 0
                    if source == Source.LEASED:
                        lease = leases[route.adapter] or Lease(-1, 0)
                        slot, generation = lease.slot, lease.generation
                    self.terms[number, group, 0] = (source, route.adapter, slot, generation)

    def routing(self, token_slots: np.ndarray) -> RowRouting:
        return RowRouting(
            groups=self.groups, row_route=token_slots, terms=self.terms, adapters=self._adapters
        )


def groups_of(shape: ModelShape) -> list[range]:
    width = len(shape.sites)
    return [range(layer * width, (layer + 1) * width) for layer in range(shape.num_layers)]


@dataclass
class Served:
    """A tiny checkpoint and two adapters, in the store of a running LoRA Server and leased."""

    model_dir: Path
    adapters: list[Path]
    packed: list[PackedAdapter]
    cluster: Cluster
    client: LoraServerClient
    leases: list[Lease]

    def logits(self, routes: Sequence[Route], streams: Sequence[int], leases=None) -> list[torch.Tensor]:
        """Of each step of a greedy continuation, all rows.  streams: route of each prompt, -1 = base."""
        given = (self.client, leases or self.leases, self.packed, routes)
        harness = RoutedHarness(self.model_dir, self.adapters, *given)
        sequences, logits = harness.prefill(PROMPTS[: len(streams)], streams)
        found = [torch.cat(logits)]
        for _ in range(NUM_TOKENS - 1):
            last = [[int(rows[-1].argmax())] for rows in logits]
            logits = harness.step(list(zip(sequences, last, strict=True)))
            found.append(torch.cat(logits))
        return found

    def num_requests(self) -> int:
        """That the server has answered."""
        assert not self.client.backend.num_fallback_rows, "the LoRA Server computed what is leased"
        return self.cluster.rank(0).loop.num_requests


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    base = make_checkpoint("mixtral", folder / "base", seed=1)
    targets = ("qkv", "o", "router", "gate_up", "down")
    paths = [make_adapter("mixtral", base, folder / f"r{r}", r, targets, seed=r, scale=0.5) for r in (4, 8)]
    shape = Harness(base).model.spec.shape
    packed = [read_adapter(path, shape, torch.float32) for path in paths]
    with Cluster(shape) as cluster:
        cluster.put(*packed)
        client = cluster.client()
        yield Served(base, paths, packed, cluster, client, cluster.granted(client, packed))


def assert_same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"step {step}"


@pytest.mark.parametrize("where", [leased, experts_leased, second_layer_leased, every_other_leased])
def test_row_takes_its_deltas_from_two_sources_by_site_and_layer(served, where):
    expected = served.logits([Route(1, local)], [0])
    assert not torch.equal(expected[0], served.logits([Route(1, local)], [-1])[0]), "the adapter shows"
    before = served.num_requests()
    assert_same_bits(served.logits([Route(1, where)], [0]), expected)
    shape = served.cluster.shape
    at_server = sum(where(n, site) == Source.LEASED for n in range(shape.num_layers) for site in shape.sites)
    assert served.num_requests() - before == NUM_TOKENS * at_server


def test_step_mixes_base_local_and_leased_rows_of_one_adapter_and_of_several(served):
    routes = [Route(0, local), Route(0, leased), Route(1, experts_leased), Route(1, second_layer_leased)]
    streams = [0, -1, 1, 2, -1, 3, 1]
    found = served.logits(routes, streams)
    all_local = [Route(route.adapter, local) for route in routes]
    assert_same_bits(found, served.logits(all_local, streams))
    # Prompts 0 and 2, and 3 and 5, are the same, with the same adapter from other sources.
    last = found[-1]
    assert torch.equal(last[0], last[2])
    assert torch.equal(last[3], last[5])


def test_row_that_lost_its_lease_is_made_up_for_beside_local_rows(served):
    routes, streams = [Route(0, leased), Route(1, local)], [0, 1, -1]
    expected = served.logits([Route(0, local), Route(1, local)], streams)
    backend = served.client.backend
    assert_same_bits(served.logits(routes, streams, [None, None]), expected)
    assert backend.num_fallback_rows > 0
    backend.num_fallback_rows = 0
