# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server whose ranks are threads of the test process, and adapters of random numbers for it."""

from __future__ import annotations

import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, PackedLayer
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.partition import Layout
from moe_lora.core.shape import MATRIX_ALIGN_BYTES, ModelShape
from moe_lora.dist.deltas.host_deltas import HostCompute
from moe_lora.dist.lora_server.attach import LeaseClient, LoraServerClient
from moe_lora.dist.lora_server.server_rank import ServerRank
from moe_lora.lora.row_routing import Lease
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")


def until(condition: Callable[[], object], what: str = "the condition holds") -> None:
    """Poll for up to PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.005)


def random_adapter(
    name: str,
    shape: ModelShape,
    lora_rank: int = 3,
    modules: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedAdapter:
    """An adapter with random matrices at the modules given (None: at all); its name is its content hash."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    targets = modules or tuple(module for site in shape.sites for module in site.modules)
    layers = tuple(
        _random_layer(shape, lora_rank, targets, dtype, generator) for _ in range(shape.num_layers)
    )
    return PackedAdapter(
        name=name,
        layers=layers,
        max_lora_rank=lora_rank,
        nbytes=sum(layer.nbytes for layer in layers),
        content_hash=name,
        targets=targets,
    )


def _random_layer(
    shape: ModelShape,
    lora_rank: int,
    targets: tuple[str, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PackedLayer:
    align = MATRIX_ALIGN_BYTES // dtype.itemsize
    table = torch.zeros(shape.num_entries, 3, dtype=torch.int64)
    size = 0
    for site in shape.sites:
        for module, width in enumerate(site.out_features):
            for expert in range(max(1, site.num_experts)):
                if site.modules[module] not in targets:
                    continue
                entry = site.entry(module, expert)
                table[entry, 2] = lora_rank
                for column, features in ((0, site.in_features), (1, width)):
                    table[entry, column] = size
                    size += -(-lora_rank * features // align) * align
    data = torch.randn(size, generator=generator).to(dtype)
    return PackedLayer(data=data, table=table, scale=torch.full((shape.num_entries,), 0.5))


class Cluster:
    """Ranks in threads; `start` and `stop` work on single ones."""

    def __init__(self, shape: ModelShape, layout: str = "EP1-PP1", **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ls")  # short: paths of sockets are
        self.shape = shape
        folder = Path(self._folder.name)
        fields = {"capacity": 4, "sites": "all", "memory_gb": 0.01, "store_dir": str(folder / "store")}
        fields["address"] = f"{folder}/leader"
        self.config = LoraServerConfig(layout=layout, **fields | settings)
        self.num_ranks = Layout.parse(layout).num_ranks
        self.ranks = 1, 1
        """expert_parallel and tensor_parallel of instances."""
        self.make_host: Callable[[], HostCompute] | None = None
        self._ranks: dict[int, tuple[ServerRank, threading.Thread]] = {}
        self._clients: list[LoraServerClient] = []
        self._leases: list[LeaseClient] = []
        self._of_granted: dict[LoraServerClient, LeaseClient] = {}

    def rank(self, number: int) -> ServerRank:
        return self._ranks[number][0]

    def start(self, number: int) -> ServerRank:
        config = EngineConfig(
            model_dir="none",
            lora_server=self.config,
            dtype="float32",
            device="cpu",
            expert_parallel=self.ranks[0],
            tensor_parallel=self.ranks[1],
        )
        rank = ServerRank(config, self.shape, number, self.make_host and self.make_host())
        thread = threading.Thread(target=rank.run, daemon=True)
        thread.start()
        self._ranks[number] = rank, thread
        return rank

    def stop(self, number: int) -> None:
        rank, thread = self._ranks.pop(number)
        rank.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    def client(self, instance: str = "i", client_rank: int = 0, **settings: Any) -> LoraServerClient:
        client = LoraServerClient(
            replace(self.config, **settings),
            self.shape,
            torch.float32,
            instance,
            client_rank=client_rank,
            ranks=self.ranks,
        )
        self._clients.append(client)
        return client

    def leases(self, client: LoraServerClient, on_change: Callable[[], None] = lambda: None) -> LeaseClient:
        self._leases.append(client.leases(on_change))
        return self._leases[-1]

    def granted(self, client: LoraServerClient, adapters: Sequence[PackedAdapter]) -> list[Lease]:
        """A lease of each adapter, which the store has."""
        leases = self._of_granted.get(client) or self.leases(client)
        self._of_granted[client] = leases  # a second connection of one instance would end the first
        for packed in adapters:
            leases.register(packed.content_hash)
            leases.acquire(packed.content_hash)
        until(lambda: all(leases.lease(p.content_hash) for p in adapters), "all leases are granted")
        return [lease for packed in adapters if (lease := leases.lease(packed.content_hash))]

    def put(self, *adapters: PackedAdapter) -> None:
        """Into the store that ranks and clients share."""
        for adapter in adapters:
            HostStore(self.config.store_dir).put(adapter)

    def __enter__(self) -> Cluster:
        for number in range(self.num_ranks):
            self.start(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for leases in self._leases:
            leases.stop()
        for client in self._clients:
            client.close()
        for number in reversed(list(self._ranks)):
            self.stop(number)
        self._folder.cleanup()
