# SPDX-License-Identifier: Apache-2.0
"""Events of cached prefixes as routers read them: vLLM's messages over ZeroMQ."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moe_lora import LLM, SamplingParams
from moe_lora.config import EngineConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.kv_events import read_settings
from moe_lora.config.optional_parts import ScalingConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.local import checked
from moe_lora.engine.kv_events import KvEvents
from tests.dist.cluster_jobs import free_port
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[2] / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
PROMPT = list(range(64, 64 + 40))


FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
}
"""As llm-d's `VLLMAdapter` reads an event: an array of the type and these values."""


def settings(**fields: Any) -> dict[str, Any]:
    port = free_port()
    usual = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv@pod@demo"}
    return {**usual, "replay_endpoint": f"tcp://127.0.0.1:{free_port()}", **fields}


def read_batch(batch: bytes) -> tuple[float, list[dict[str, Any]], int]:
    """A batch [ts, events, rank], with its events as maps."""
    ts, events, rank = msgspec.msgpack.decode(batch, type=tuple[float, list[tuple[Any, ...]], int])
    return ts, [{"type": tag, **dict(zip(FIELDS[tag], rest, strict=True))} for tag, *rest in events], rank


class Reader:
    """A router's side."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.context = zmq.Context()
        self.live, self.late = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket, name in ((self.live, "endpoint"), (self.late, "replay_endpoint")):
            socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
            socket.connect(given[name])
        self.live.subscribe("kv@")
        self.topic = given["topic"].encode()

    def repeated(self, first: int) -> list[tuple[int, Any]]:
        """Batches from a number on."""
        self.late.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, topic, number, batch = self.late.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                assert (topic, batch) == (b"", b"")
                return found
            assert topic == self.topic
            found.append((int.from_bytes(number, "big"), read_batch(batch)))

    def close(self) -> None:
        self.context.destroy(linger=0)


def until_told(reader: Reader, num_events: int) -> list[Any]:
    """All events once there are so many; the publisher's thread follows the engine."""
    end_s = time.monotonic() + PATIENCE_S
    events: list[Any] = []
    while len(events) < num_events and time.monotonic() < end_s:
        events = [event for _, (_, events, _) in reader.repeated(0) for event in events]
    return events


def test_an_engine_tells_a_router_what_prefixes_it_holds_and_no_longer_holds():
    given = settings()
    reader = Reader(given)
    adapters = {"upper": str(DEMO / "adapters" / "upper")}
    with LLM(
        str(DEMO / "model"), adapters=adapters, eager=True, num_threads=1, kv_events=json.dumps(given)
    ) as llm:
        size = EngineConfig(model_dir="m").block_size
        num = len(PROMPT) // size
        llm.generate([PROMPT], sampling=GREEDY)
        llm.generate([PROMPT], "upper", GREEDY)
        llm.generate([PROMPT], sampling=GREEDY)  # found, so nothing new
        base, upper = until_told(reader, 2)
        for event, name in ((base, None), (upper, "upper")):
            assert event["type"] == "BlockStored"
            assert event["lora_name"] == name
            assert (event["lora_id"] is None) == (name is None)
            assert (event["parent_block_hash"], event["block_size"], event["medium"]) == (None, size, "GPU")
            assert event["token_ids"] == PROMPT[: num * size]
            assert len(event["block_hashes"]) == num
        llm.generate([[*PROMPT, *PROMPT]], sampling=GREEDY)
        (longer,) = until_told(reader, 3)[2:]
        assert longer["parent_block_hash"] == base["block_hashes"][-1]
        assert longer["token_ids"] == [*PROMPT, *PROMPT][num * size : len(PROMPT) * 2 // size * size]
        llm.unload_adapter("upper")
        (gone,) = until_told(reader, 4)[3:]
        assert (gone["type"], gone["block_hashes"]) == ("BlockRemoved", upper["block_hashes"])
        batches = reader.repeated(0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert {rank for _, (_, _, rank) in batches} == {0}
        assert reader.repeated(len(batches)) == []
        assert reader.repeated(1) == batches[1:]
    reader.close()
    with LLM(str(DEMO / "model"), eager=True, num_threads=1, kv_events=json.dumps(given)):
        pass  # the ports are free again


def test_equal_hashes_of_two_instances_mean_the_same_adapter_and_tokens():
    """llm-d has one map from hashes to blocks for all pods; numbers of versions differ between pods."""
    found: list[dict[str | None, list[int]]] = []
    for names in (("upper", "rot13"), ("rot13", "upper")):
        given = settings()
        reader = Reader(given)
        adapters = {name: str(DEMO / "adapters" / name) for name in names}
        with LLM(
            str(DEMO / "model"), adapters=adapters, eager=True, num_threads=1, kv_events=json.dumps(given)
        ) as llm:
            for name in (None, *names):
                llm.generate([PROMPT], name, GREEDY)
            found.append({event["lora_name"]: event["block_hashes"] for event in until_told(reader, 3)})
        reader.close()
    assert found[0] == found[1]
    assert len(set.union(*(set(hashes) for hashes in found[0].values()))) == sum(map(len, found[0].values()))


def test_a_subscriber_gets_batches_as_they_come_and_an_instance_adds_its_number_to_ports():
    given = settings()
    host, port = given["endpoint"].rsplit(":", 1)
    given["endpoint"], given["replay_endpoint"] = f"{host}:{int(port) - 3}", None
    events = KvEvents(read_settings(json.dumps(given)), 4, "instance-3")
    reader = Reader({**given, "endpoint": f"{host}:{port}", "replay_endpoint": f"{host}:{port}"})
    poller = zmq.Poller()
    poller.register(reader.live)
    while not poller.poll(20):  # a subscription takes a moment to arrive
        events.stored(None, None, [2**64 - 1], [1, 2, 3, 4])
    topic, _, batch = reader.live.recv_multipart()
    _, (event, *_), rank = read_batch(batch)
    assert (topic, rank, event["block_hashes"]) == (b"kv@pod@demo", 3, [2**64 - 1])
    reader.close()
    events.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not vLLM's kv_events_config"),
        ('{"enable_kv_cache_events": true, "place": "tcp://*:5557"}', "place"),
        ('{"enable_kv_cache_events": true, "publisher": "kafka"}', "kafka"),
        ('{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/a"}', "tcp://HOST:PORT"),
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_settings_that_mean_nothing_here_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", kv_events=given)


def test_instances_of_one_host_need_ports_of_their_own():
    def config(port: int, replay: int, num_instances: int) -> EngineConfig:
        given = settings(endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay}")
        return EngineConfig(
            model_dir=str(DEMO / "model"), kv_events=json.dumps(given), num_instances=num_instances
        )

    def cluster(*given: int, **sections: Any) -> ClusterConfig:
        return ClusterConfig(engine=config(*given), served_model_name="b", **sections)

    for ports in ((5557, 5558), (5558, 5557)):
        two = cluster(*ports, 2)  # each may have a host of its own
        scaled = cluster(*ports, 1, scaling=ScalingConfig(max_instances=2))
        with pytest.raises(ConfigError, match=r"endpoint=tcp.* and replay_endpoint=tcp.* share ports"):
            checked(two)
        with pytest.raises(ConfigError, match="share ports: 2 instances of this host"):
            checked(scaled)
    checked(cluster(5557, 5559, 2))
    checked(cluster(65534, 5557, 2))
    for ports in ((65534, 5557), (5557, 65534)):
        with pytest.raises(ConfigError, match="65534 leaves no ports for 3 instances"):
            config(*ports, 3)


def test_events_may_be_off_in_their_settings_and_a_taken_port_is_named():
    assert read_settings("{}") is None
    assert read_settings('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    given = read_settings(json.dumps(settings()))
    events = KvEvents(given, 4, "a")
    with pytest.raises(ConfigError, match="free port"):
        KvEvents(given, 4, "a")
    events.close()
