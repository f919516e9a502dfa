# SPDX-License-Identifier: Apache-2.0
"""Settings of the events of cached prefixes (`engine.kv_events`), imported when there are any."""

from __future__ import annotations

import re

import msgspec

from moe_lora.core.errors import ConfigError

DEFAULT_ADDRESS = "tcp://*:5557"
NUM_KEPT = 10_000
"""Batches that can be repeated, unless the settings say otherwise."""
QUEUE_LENGTH = 100_000
"""Messages for a slow reader; later ones are dropped, and the reader asks for them by number."""


class KvEventSettings(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`.  Addresses: tcp://HOST:PORT; instance n has the port above by n."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = DEFAULT_ADDRESS
    replay_endpoint: str | None = None
    buffer_steps: int = NUM_KEPT
    hwm: int = QUEUE_LENGTH
    max_queue_size: int = QUEUE_LENGTH
    topic: str = ""


def read_settings(text: str, num_instances: int = 1, *, one_host: bool = False) -> KvEventSettings | None:
    """The settings in JSON; None: no events.  Raises ConfigError, also if ports of one host collide."""
    try:
        found = msgspec.json.decode(text, type=KvEventSettings)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"kv_events={text[:200]} is not vLLM's kv_events_config in JSON: {error}"
        ) from error
    if not found.enable_kv_cache_events or found.publisher == "null":
        return None
    if found.publisher not in (None, "zmq"):
        raise ConfigError(f'kv_events: publisher={found.publisher!r:.40} must be "zmq" or "null"')
    if found.buffer_steps < 1 or found.hwm < 0:
        raise ConfigError("kv_events: buffer_steps must be at least 1, and hwm at least 0")
    ports = list[int]()
    for place, address in (("endpoint", found.endpoint), ("replay_endpoint", found.replay_endpoint)):
        if address is None:
            continue
        if not re.fullmatch(r"tcp://.+:\d{1,5}", address):
            raise ConfigError(f"kv_events: {place}={address[:100]} must be tcp://HOST:PORT, HOST * for all")
        ports.append(int(address.rpartition(":")[2]))
        if ports[-1] + num_instances > 1 << 16:
            raise ConfigError(f"kv_events: {place}={address} leaves no ports for {num_instances} instances")
    if one_host and len(ports) > 1 and abs(ports[0] - ports[1]) < num_instances:
        raise ConfigError(
            f"kv_events: endpoint={found.endpoint} and replay_endpoint={found.replay_endpoint} share ports: "
            f"{num_instances} instances of this host add 0 to {num_instances - 1}; "
            f"give ports {num_instances} apart"
        )
    return found
