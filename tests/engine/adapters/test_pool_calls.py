# SPDX-License-Identifier: Apache-2.0
"""Two engines of a pool in one process: the calls by which one serves what the other holds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from demo.tasks import prompt_for
from moe_lora.api import LLM, InProcessClient
from moe_lora.config import EngineConfig, LoraServerConfig, PoolConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFailedError,
    AdapterNotFoundError,
    ConfigError,
)
from moe_lora.core.request import GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.launch.cluster_file import check_pool
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import PoolEntry
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[3] / "demo"
SETTINGS = {"dtype": "float32", "eager": True, "num_threads": 1}


@pytest.fixture(scope="module", params=["shm", "gloo"])
def engines(request) -> Iterator[tuple[InProcessClient, InProcessClient]]:
    pool = PoolConfig(transport=request.param)
    config = EngineConfig(model_dir=str(DEMO / "model"), pool=pool, **SETTINGS)
    clients = [InProcessClient(build_engine(config)) for _ in range(2)]
    yield tuple(clients)
    for client in clients:
        client.shut_down()


@pytest.fixture
def path(tmp_path) -> str:
    return str(shutil.copytree(DEMO / "adapters" / "upper", tmp_path / "upper"))


def ask(client: InProcessClient, adapter: str) -> tuple[list[int], TokenOutput]:
    """Tokens of an answer, and its last output."""
    outputs: SimpleQueue = SimpleQueue()
    prompt = tuple(ord(character) % 128 for character in prompt_for("abc"))
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    request = GenerateRequest(
        request_id=f"r{id(outputs)}", prompt_token_ids=prompt, sampling=sampling, adapter=adapter
    )
    client.submit(request, outputs.put)
    tokens: list[int] = []
    while True:
        output = outputs.get(timeout=PATIENCE_S)
        if isinstance(output, Exception):
            raise output
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens, output


def call(client: InProcessClient, method: str, *args):
    return client.start_call(method, *args).result(PATIENCE_S)


def pool_stats(client: InProcessClient) -> tuple[int, int, int]:
    stats = call(client, "stats")
    return stats.pool_adapters, stats.pool_peer_fetches, stats.pool_disk_fetches


def free_all(client: InProcessClient) -> None:
    """Free what is held and not served, and see that nothing else is held."""
    for content_hash in call(client, "pool_orphans"):
        assert call(client, "pool_known", [content_hash]) == []
        call(client, "pool_free", content_hash)
    assert pool_stats(client)[0] == 0


def test_one_serves_what_the_other_holds(engines, path):
    one, two = engines
    entry: PoolEntry = call(one, "pool_load", "a", path, False, 1)
    before = pool_stats(two)
    known: PoolEntry = call(two, "pool_know", entry.facts, "nowhere", False, 1, [entry.source])
    assert (known.source, known.info.residency, entry.info.residency) == (None, "peer", "host")
    tokens, _ = ask(one, "a")
    assert ask(two, "a")[0] == tokens
    assert pool_stats(two) == (0, before[1] + 1, before[2])
    source = call(two, "pool_hold", entry.facts.content_hash, [entry.source])
    call(one, "pool_drop", entry.facts.content_hash)
    call(one, "pool_sources", {entry.facts.content_hash: [source], "unknown": []})
    assert [entry.source for entry in call(two, "pool_state")] == [source]
    assert [entry.source for entry in call(one, "pool_state")] == [None]
    for engine in engines:
        assert ask(engine, "a")[0] == tokens
        call(engine, "unload_adapter", "a")
        free_all(engine)
    with pytest.raises(AdapterNotFoundError):
        call(one, "pool_hold", entry.facts.content_hash, [])


def test_request_whose_adapter_is_nowhere_ends_with_an_error_and_the_engine_goes_on(engines, path):
    one, two = engines
    entry: PoolEntry = call(one, "pool_load", "a", path, False, 1)
    tokens, _ = ask(one, "a")
    call(one, "unload_adapter", "a")
    free_all(one)
    call(two, "pool_know", entry.facts, path, False, 1, [entry.source])
    shutil.rmtree(path)
    _, last = ask(two, "a")
    assert last.finish_reason == "error"
    assert "adapter 'a' is unavailable: it could not be loaded" in (last.error or "")
    with pytest.raises(AdapterFailedError, match="on try again"):
        ask(two, "a")
    with pytest.raises(AdapterError):
        call(two, "pool_hold", entry.facts.content_hash, [entry.source])
    shutil.copytree(DEMO / "adapters" / "upper", path)
    while call(two, "list_adapters")[0].residency == "unavailable":
        with suppress(AdapterFailedError):
            assert ask(two, "a")[0] == tokens
        time.sleep(0.1)
    call(two, "unload_adapter", "a")


def test_request_that_waits_for_a_version_is_answered_by_it_though_another_one_took_its_place(engines, path):
    one, two = engines
    entry: PoolEntry = call(one, "pool_load", "a", path, False, 1)
    tokens, _ = ask(one, "a")
    call(two, "pool_know", entry.facts, path, False, 1, [entry.source])
    shutil.rmtree(path)
    shutil.copytree(DEMO / "adapters" / "reverse", path)
    new: PoolEntry = call(one, "pool_load", "a", path, True, 2)
    assert ask(two, "a")[0] == tokens, "it has not heard of the new version yet"
    call(two, "pool_know", new.facts, path, True, 2, [new.source])
    assert ask(two, "a")[0] == ask(one, "a")[0] != tokens
    assert call(two, "pool_known", [entry.facts.content_hash]) == []
    for engine in engines:
        call(engine, "unload_adapter", "a")
        free_all(engine)


def test_load_that_is_refused_leaves_nothing(engines, path):
    one, _ = engines
    call(one, "pool_load", "a", path, False, 1)
    for name, place in (("a", path), ("b", path + "-missing")):
        with pytest.raises(ValueError, match=r"already loaded|no such folder"):
            call(one, "pool_load", name, place, False, 1)
    assert pool_stats(one)[0] == 1
    call(one, "unload_adapter", "a")
    free_all(one)


def test_sources_are_known_before_a_load_and_not_after_a_refusal(engines, path, monkeypatch):
    """A pinned adapter's load starts within `add_adapter`."""
    one, two = engines
    pool, add, seen = two.core.adapters.store, two.core.add_adapter, []

    def add_adapter(packed, *args, **words):
        seen.append(pool.place(packed.content_hash))
        return add(packed, *args, **words)

    monkeypatch.setattr(two.core, "add_adapter", add_adapter)
    entry: PoolEntry = call(one, "pool_load", "a", path, False, 1)
    call(two, "pool_know", entry.facts, "nowhere", False, 1, [entry.source])
    other: PoolEntry = call(one, "pool_load", "a", str(DEMO / "adapters" / "reverse"), True, 2)
    with pytest.raises(AdapterExistsError):
        call(two, "pool_know", other.facts, "nowhere", False, 2, [other.source])
    assert seen == ["peer", "peer"]
    assert list(pool._sources) == [entry.facts.content_hash]
    for engine in engines:
        call(engine, "unload_adapter", "a")
        free_all(engine)


def test_settings_that_do_not_go_with_a_pool_are_refused():
    server = LoraServerConfig(address="server:7500", store_dir="-")
    with pytest.raises(ConfigError, match="a LoRA Server"):
        EngineConfig(model_dir="", pool=PoolConfig(), lora_server=server)
    with pytest.raises(ConfigError, match=r"pool.transport='nixl'"):
        PoolConfig(transport="nixl")
    with pytest.raises(ConfigError, match=r"pool.replicas=0"):
        PoolConfig(replicas=0)
    for count, reason in ((1, "several instances"), (2, r"replicas=3 is more than the 2 instances")):
        with pytest.raises(ConfigError, match=reason):
            check_pool(EngineConfig(model_dir="", pool=PoolConfig(replicas=3), num_instances=count))
    with pytest.raises(ConfigError, match="several instances"):
        LLM(str(DEMO / "model"), pool=PoolConfig())


def test_engine_without_a_pool_says_so_and_goes_on():
    client = InProcessClient(build_engine(EngineConfig(model_dir=str(DEMO / "model"), **SETTINGS)))
    try:
        with pytest.raises(ConfigError, match="has no pool_state"):
            call(client, "pool_state")
        assert call(client, "list_adapters") == []
    finally:
        client.shut_down()
