"""Joins one rank of an LLM instance to the LoRA Server."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.config import LoraServerConfig
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.protocol.control_messages import DataHello, LeasesHello
from moe_lora.dist.lora_server.protocol.partition import Layout, Partition
from moe_lora.dist.lora_server.protocol.reach import server_transport
from moe_lora.dist.lora_server.protocol.session import FrameLayout
from moe_lora.dist.lora_server.server.membership import find_rank
from moe_lora.dist.lora_server.server.server_rank import agreed_facts
from moe_lora.dist.net.keys import keys_in

from .lease_client import LeaseClient
from .remote_backend import RemoteBackend
from .server_link import ServerLink

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 120.0


class LoraServerClient:
    """One client rank's connections: links to all server ranks it sends to, and the backend over them.

    Raises ConfigError for a layout that does not fit the model, LoraServerError if the server is not there.
    """

    def __init__(
        self,
        server: LoraServerConfig,
        shape: ModelShape,
        dtype: torch.dtype,
        instance: str,
        *,
        client_rank: int = 0,
        client_ranks: int = 1,
    ) -> None:
        self._server = server
        self._keys = keys_in(server.certificates)
        self._instance = instance
        self._name = f"{instance}/{client_rank}"
        self._agreed = agreed_facts(shape, dtype, server, client_ranks)
        layout = FrameLayout(shape, dtype, server.max_rows)
        self.store = HostStore(server.store_dir)
        self.partition = partition = Partition(
            shape, Layout.parse(server.layout), client_ranks, sites=server.sites
        )
        self._transport = server_transport(server, f"{instance}/{client_rank}")
        self.links: dict[int, ServerLink] = {}
        for server_rank in range(partition.layout.num_ranks):
            if client_rank in partition.clients_of_server(server_rank):
                self.links[server_rank] = self._link(server_rank, layout)
        try:
            for link in self.links.values():
                link.begin(link.connect(CONNECT_TIMEOUT_S))
        except BaseException:
            self.close()
            raise
        self.backend = RemoteBackend(shape, partition, client_rank, self.links, layout, self.store)

    def leases(self, on_change: Callable[[], None]) -> LeaseClient:
        """The instance's leases; its first rank has them."""
        return LeaseClient(
            self._server.address,
            self._keys,
            LeasesHello(name=self._name, instance=self._instance, agreed=self._agreed),
            self.store,
            on_change,
            silence_s=self._server.lease_timeout_s,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    def close(self) -> None:
        for link in self.links.values():
            link.stop()
        for link in self.links.values():
            if link.ident is not None:
                link.join(timeout=5.0)
        self._transport.close()

    def _link(self, server_rank: int, layout: FrameLayout) -> ServerLink:
        def find(timeout_s: float) -> str:
            return find_rank(self._server.address, self._keys, self._agreed, server_rank, timeout_s)

        hello = DataHello(
            name=self._name,
            instance=self._instance,
            agreed=self._agreed,
            server_rank=server_rank,
            answers=b"",
            max_rows=layout.max_rows,
            depth=self._server.depth,
        )
        return ServerLink(
            find,
            self._keys,
            hello,
            self._transport,
            layout,
            depth=self._server.depth,
            answer_timeout_s=self._server.answer_timeout_s,
        )
