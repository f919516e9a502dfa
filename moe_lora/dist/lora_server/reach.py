# SPDX-License-Identifier: Apache-2.0
"""Addresses and agreed facts around a LoRA Server."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Any

import torch

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.address import Address, own_host, parse_address
from moe_lora.core.errors import LoraServerError
from moe_lora.core.partition import Partition
from moe_lora.dist.lora_server.control import Visitor
from moe_lora.dist.transport.contract import Transport, make_transport


def agreed_facts(partition: Partition, dtype: torch.dtype, server: LoraServerConfig) -> dict[str, Any]:
    """Facts that must agree on all processes."""
    shape = partition.shape
    return {
        "dtype": str(dtype),
        "layout": str(partition.layout),
        "transport": server.transport,
        "device_puts": server.device_puts,
        "sites": server.sites,
        "expert_parallel": partition.expert_parallel,
        "tensor_parallel": max(1, len(partition.shards)),
        **asdict(shape),
        "dense_layers": list(shape.dense_layers),
        "delta": repr(shape.delta),
        "global_heads": repr(shape.global_heads),
    }


def client_name(instance: str, client_rank: int) -> str:
    """Name of an instance's rank."""
    return f"{instance}/{client_rank}"


def instance_of(client: str) -> str:
    """The instance in a `client_name`."""
    return client.rpartition("/")[0]


def server_transport(server: LoraServerConfig, name: str, put_timeout_s: float | None = None) -> Transport:
    """This process's end of the configured transport.

    put_timeout_s: limit of a blocking put.  Raises ConfigError for device_puts without libraries.
    """
    if server.device_puts != "none":
        from moe_lora.dist.transport.device_puts import check_device_puts

        check_device_puts(server.device_puts)
    if server.transport == "gloo":
        host = own_host(server.address)
        return make_transport("gloo", name=name, host=host, put_timeout_s=put_timeout_s)
    return make_transport(server.transport, name=name)


class DeviceMembers:
    """The device meeting of a LoRA Server."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.lora_server is not None
        self._config = config
        place = parse_address("lora_server.address", config.lora_server.address)
        host = place.host or own_host(config.lora_server.address)
        with socket.socket() as free:
            free.bind(("", 0))
            self.address = str(Address(host, free.getsockname()[1]))
        self.max_rows = max(config.decode_buckets or (config.max_num_seqs,))
        self._instances: dict[str, int] = {}

    async def join(self, visitor: Visitor, instance: str) -> tuple[str, int, int, int]:
        """See `ServerCalls.join_devices`."""
        number = -1
        if instance:
            if instance in self._instances or len(self._instances) == self._config.num_instances:
                raise LoraServerError(
                    f"{instance} comes too late: devices of {self._known} put to the LoRA Server; start it "
                    "and all instances together"
                )
            number = self._instances[instance] = len(self._instances)
        return self.address, number, self._config.num_instances, self.max_rows

    @property
    def _known(self) -> str:
        return ", ".join(self._instances)
