# SPDX-License-Identifier: Apache-2.0
"""Fetching an adapter from another instance's memory, against a copy in one's own and against disk.

    python -m bench.cluster.bench_pool --out bench/results/pool.jsonl [--quick]

Expected before the first run (reasons: README.md), as multiples of one memcpy of the adapter: shm by layer
1.3, shm whole 2.3, gloo by layer 6, gloo whole 7, disk 10; shm for two ranks 10: a read, its hash (5), a
file, and a copy of each rank's part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.interleave import interleave, ratio, repeated
from bench.harness.random_model import FULL, TINY, ModelSize, write_adapter, write_config
from bench.harness.records import Recorder
from moe_lora.adapters.host_store import HostStore, adapter_without_data, facts_of, is_intact
from moe_lora.adapters.packed import PackedAdapter, entries_of_experts
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.request import AdapterFacts
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.transport import make_transport
from moe_lora.engine.adapters.adapter_store import ShardSizes
from moe_lora.engine.adapters.copies import Arenas, BringAdapter, RankCopier
from moe_lora.engine.adapters.pool_fetch import fetch_layers
from moe_lora.engine.adapters.pool_store import PoolAdapters
from moe_lora.engine.verbs import Sources
from moe_lora.families import shape_of
from moe_lora.kernels.operands import SlotTable

KINDS = ("shm", "gloo")
RANKS = (8, 64)
NUM_ROUNDS = 15
BY_RANKS = "shm for two ranks"
EXPECTED = {
    "shm by layer": 1.3,
    "shm whole": 2.3,
    BY_RANKS: 10.0,
    "gloo by layer": 6.0,
    "gloo whole": 7.0,
    "disk": 10.0,
}
PAGE_BYTES = 1 << 16
_DTYPE = torch.bfloat16

Bring = Callable[[], object]
"""A way to bring the adapter to the arena."""


def serve(pipe: Connection, path: Path, model_dir: Path) -> None:
    """The instance with the adapter, once per transport, until stopped."""
    torch.set_num_threads(1)
    packed = read_adapter(path, shape_in(model_dir), _DTYPE)
    with ExitStack() as stack:
        sources = {}
        for kind in KINDS:
            pool = stack.enter_context(pool_of(kind, "holder", path, model_dir))
            pool.keep(pool.prepare(packed))
            sources[kind] = pool.source(packed.content_hash)
        pipe.send((facts_of(packed), sources))
        pipe.recv()


def shape_in(model_dir: Path) -> ModelShape:
    return shape_of(read_config(model_dir))


@contextmanager
def pool_of(kind: str, name: str, path: Path, model_dir: Path, **options: Any) -> Iterator[PoolAdapters]:
    """One instance's adapters."""
    shape = shape_in(model_dir)

    def read(_: str, adapter: str, content: str) -> PackedAdapter:
        return read_adapter(path, shape, _DTYPE, adapter)

    with make_transport(kind, name=name) as transport:
        yield PoolAdapters(transport, read, **options)


class TwoRanks:
    """Ranks of tensor parallelism, one after the other: real ones copy at the same time."""

    def __init__(self, packed: PackedAdapter, shape: ModelShape) -> None:
        self._packed = self._given = packed
        shards = [ModelShard(shape, 2, dist_rank=rank) for rank in range(2)]
        kept = [entries_of_experts(shape, shard.experts) for shard in shards]
        self.sizes = ShardSizes(shape, PAGE_BYTES, kept, shards[0])
        num_pages = self.sizes.layer_pages(packed.layers)
        firsts = (0, *accumulate(num_pages[:-1]))
        self._order = BringAdapter(0, packed.content_hash, firsts, None)
        self._memories = [torch.ones(sum(num_pages) * PAGE_BYTES, dtype=torch.uint8) for _ in shards]
        self._copiers = [
            RankCopier(
                Arenas(memory, None, PAGE_BYTES),
                SlotTable(1, shape.num_layers, shape.num_entries, memory.device),
                shape,
                of_rank,
                lambda _: self._given,
                shard=shard,
            )
            for memory, of_rank, shard in zip(self._memories, kept, shards, strict=True)
        ]

    def bring(self, pool: PoolAdapters) -> None:
        """Fetch once, and copy each rank's part."""
        pool.sharing(self._packed.content_hash)()
        packed = pool.at_hand(self._packed.content_hash)
        assert packed is not None
        self._copy(packed)
        pool.unshare(self._packed.content_hash)

    def check(self, pool: PoolAdapters) -> None:
        self.bring(pool)
        found = [memory.clone() for memory in self._memories]
        self._copy(self._packed)
        assert all(map(torch.equal, found, self._memories)), "a rank has another part"

    def _copy(self, packed: PackedAdapter) -> None:
        self._given = packed
        for copier in self._copiers:
            copier.carry_out(self._order)


class Arena:
    """Target of the layers."""

    def __init__(self, packed: PackedAdapter) -> None:
        self.packed = packed
        self.memory = torch.ones(sum(layer.nbytes for layer in packed.layers), dtype=torch.uint8)
        self.targets = list(self.memory.split([layer.nbytes for layer in packed.layers]))
        self.staged = list(torch.ones_like(self.memory).split([layer.nbytes for layer in packed.layers]))

    def copy(self, layers: list[torch.Tensor]) -> None:
        for source, target in zip(layers, self.targets, strict=True):
            np.copyto(target.numpy(), source.numpy())

    def check(self, bring: Bring, name: str) -> None:
        self.memory.zero_()
        bring()
        for layer, target in zip(self.packed.layers, self.targets, strict=True):
            assert torch.equal(layer.data.view(torch.uint8), target), f"{name} brought something else"


def contestants(
    pools: dict[str, PoolAdapters], facts: AdapterFacts, arena: Arena, path: Path, shape: ModelShape
) -> dict[str, Bring]:
    """All ways, by name."""
    layers = [layer.data.view(torch.uint8) for layer in arena.packed.layers]

    def fetch(pool: PoolAdapters, targets: list[torch.Tensor]) -> None:
        reader = pool.reader(facts.content_hash)
        assert reader is not None
        fetch_layers(reader, targets)

    def whole(pool: PoolAdapters) -> None:
        fetch(pool, arena.staged)
        arena.copy(arena.staged)

    def disk() -> None:
        packed = read_adapter(path, shape, _DTYPE)
        arena.copy([layer.data.view(torch.uint8) for layer in packed.layers])

    found: dict[str, Bring] = {"memcpy": partial(arena.copy, layers), "disk": disk}
    for kind, pool in pools.items():
        found |= {
            f"{kind} by layer": partial(fetch, pool, arena.targets),
            f"{kind} whole": partial(whole, pool),
        }
    return found


def measure(size: ModelSize, lora_rank: int, num_rounds: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Results by way."""
    write_config(folder, size)
    path = write_adapter(folder / "adapter", size, folder, lora_rank, experts=True, seed=0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, path, folder))
    holder.start()
    facts, sources = ours.recv()
    shape = shape_in(folder)
    arena = Arena(read_adapter(path, shape, _DTYPE))
    assert is_intact(arena.packed)
    with ExitStack() as stack:
        pools = {kind: stack.enter_context(pool_of(kind, "reader", path, folder)) for kind in KINDS}
        for kind, pool in pools.items():
            know(pool, facts, (sources[kind],))
        ways = contestants(pools, facts, arena, path, shape)
        for name, bring in ways.items():
            arena.check(bring, name)
        ranks = TwoRanks(arena.packed, shape)
        options = {"store": HostStore(folder / "files"), "sizes": ranks.sizes}
        of_ranks = stack.enter_context(pool_of("shm", "ranks", path, folder, **options))
        know(of_ranks, facts, (sources["shm"],))
        ranks.check(of_ranks)
        ways[BY_RANKS] = partial(ranks.bring, of_ranks)
        times = interleave(
            {name: (repeated(bring), 1, num_rounds) for name, bring in ways.items()}, num_rounds
        )
    ours.send("stop")
    holder.join()
    return {
        name: {
            "seconds": float(np.median(taken)),
            "gb_per_s": facts.nbytes / float(np.median(taken)) / 1e9,
            "over_memcpy": ratio(taken, times["memcpy"]),
            "nbytes": facts.nbytes,
        }
        for name, taken in times.items()
    }


def know(pool: PoolAdapters, facts: AdapterFacts, sources: Sources) -> None:
    """Tell an instance of an adapter on other instances."""
    pool.keep(adapter_without_data(facts))
    pool.set_sources(facts.content_hash, sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny adapter, three rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("expected", json.dumps(EXPECTED))
    record = Recorder(arguments.out)
    size, ranks, rounds = (TINY, RANKS[:1], 3) if arguments.quick else (FULL, RANKS, NUM_ROUNDS)
    for lora_rank in ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(size, lora_rank, rounds, Path(folder))
        for name, result in results.items():
            record({"bench": "pool", "way": name, "lora_rank": lora_rank, **size.describe()}, result)
            over = result["over_memcpy"]
            print(
                f"{result['nbytes'] / 1e6:6.1f} MB {name:<14} {1e3 * result['seconds']:8.2f} ms "
                f"{result['gb_per_s']:6.2f} GB/s  {over['median']:.2f} x memcpy "
                f"[{over['p25']:.2f}, {over['p75']:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
