# SPDX-License-Identifier: Apache-2.0
"""Addresses and agreed facts of the processes around a LoRA Server."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Any

import torch

from moe_lora.config import LoraServerConfig
from moe_lora.core.address import parse_address
from moe_lora.core.errors import LoraServerError
from moe_lora.core.partition import Layout
from moe_lora.core.shape import ModelShape
from moe_lora.dist.transport.contract import Transport, make_transport


def agreed_facts(
    shape: ModelShape, dtype: torch.dtype, server: LoraServerConfig, expert_parallel: int
) -> dict[str, Any]:
    """Facts that must agree on all processes of a LoRA Server."""
    return {
        "dtype": str(dtype),
        "layout": str(Layout.parse(server.layout)),
        "transport": server.transport,
        "device_puts": server.device_puts,
        "sites": server.sites,
        "expert_parallel": expert_parallel,
        **asdict(shape),
    }


def client_name(instance: str, client_rank: int) -> str:
    """Name of an instance's rank at the LoRA Server."""
    return f"{instance}/{client_rank}"


def own_host(address: str) -> str:
    """This host's IP address on the route to a control address.

    Raises LoraServerError without a route.
    """
    place = parse_address("lora_server.address", address)
    if place.path:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((place.host, place.port))
            return str(sock.getsockname()[0])
    except OSError as error:
        raise LoraServerError(
            f"there is no way to the address {address} from this host ({error}); correct it"
        ) from error


def server_transport(server: LoraServerConfig, name: str, put_timeout_s: float | None = None) -> Transport:
    """This process's end of the configured transport.

    put_timeout_s: limit of a put to a stuck peer, on media with blocking puts.
    """
    if server.transport == "gloo":
        host = own_host(server.address)
        return make_transport("gloo", name=name, host=host, put_timeout_s=put_timeout_s)
    return make_transport(server.transport, name=name)
