# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server that becomes too small for its load is seen to be, and made larger, while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.tasks import MAX_CHARS, MIN_CHARS, prompt_for, sample_text
from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server
from .live_server import wait_until

ADAPTERS = list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:12]
CAPACITY = 3
CLUSTER = f"""
model_dir: {DEMO / "model"}
engine: {{eager: true, dtype: float32}}
lora_server: {{layout: EP2-PP1, capacity: {CAPACITY}, memory_gb: 0.05}}
provision: {{target_iar: 0.9, window_s: 0.8}}
fixed: {{provision: {{interval_s: 0.1}}}}
"""
Question = tuple[str, str]


def questions() -> list[Question]:
    rng = random.Random(5)
    return [
        (adapter, prompt_for(sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS))))
        for adapter in ADAPTERS
        for _ in range(2)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[DemoServer]:
    folder = tmp_path_factory.mktemp("resize")
    (folder / "cluster.yaml").write_text(CLUSTER)
    options = ("--config", str(folder / "cluster.yaml"), "--lora-dir", str(DEMO / "adapters"))
    with demo_server(folder / "log", *options) as made:
        yield made


async def answer(http: httpx.AsyncClient, question: Question) -> tuple[int, ...]:
    adapter, prompt = question
    sampling = {"max_tokens": 12, "min_tokens": 12, "temperature": 0, "return_token_ids": True}
    response = await http.post("/v1/completions", json={"model": adapter, "prompt": prompt, **sampling})
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


@contextlib.asynccontextmanager
async def load(
    http: httpx.AsyncClient, asked: Sequence[Question], in_flight: int, right: dict[Question, tuple[int, ...]]
) -> AsyncIterator[None]:
    """Keeps `in_flight` requests under way and checks each answer; raises, at the end, what went wrong."""
    stopping = asyncio.Event()
    following = itertools.cycle(asked)

    async def client() -> None:
        while not stopping.is_set():
            question = next(following)
            assert await answer(http, question) == right[question]

    tasks = [asyncio.create_task(client()) for _ in range(in_flight)]
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*tasks)


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


async def until(http: httpx.AsyncClient, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The metrics once the condition holds of them."""
    for _ in range(int(PATIENCE_S / 0.1)):
        found = await metrics(http)
        if "moe_lora:iar_predicted" in found and condition(found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {PATIENCE_S} s: {found}")


@pytest.mark.slow
def test_metric_crosses_the_target_with_the_load_and_comes_back_with_the_capacity(server):
    async def play() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
            asked = questions()
            right = {question: await answer(http, question) for question in asked}
            async with load(http, asked[:4], 16, right):  # two adapters
                few = await until(http, lambda m: m["moe_lora:expected_active_adapters"] < 2.5)
                assert few["moe_lora:iar_predicted"] >= 0.9
                assert few["moe_lora:adapter_capacity_needed"] <= CAPACITY
            async with load(http, asked, 16, right):
                many = await until(http, lambda m: m["moe_lora:iar_predicted"] < 0.9)
                assert (
                    many["moe_lora:adapter_capacity"] == CAPACITY < many["moe_lora:adapter_capacity_needed"]
                )
                assert many["moe_lora:lora_server_up"] == 1
                response = await http.post("/v1/lora_server/capacity", json={"capacity": len(ADAPTERS)})
                assert response.json()["capacity"] == len(ADAPTERS)
                enough = await until(http, lambda m: m["moe_lora:iar_predicted"] >= 0.9)
                assert enough["moe_lora:lora_server_capacity"] == len(ADAPTERS)
                await until(http, lambda m: m["moe_lora:lora_server_resident_adapters"] == len(ADAPTERS))
                await until(http, lambda m: m.get("moe_lora:iar_measured", 0.0) >= 0.9)
                shrunk = await http.post("/v1/lora_server/capacity", json={"capacity": CAPACITY})
                assert shrunk.json()["capacity"] == CAPACITY
                await until(http, lambda m: m["moe_lora:lora_server_resident_adapters"] <= CAPACITY)
            assert {question: await answer(http, question) for question in asked} == right

    asyncio.run(play())
    log = server.log.read_text()
    assert "room for 3 adapters is too little" in log
    assert "room for 12 adapters is enough again" in log


@pytest.mark.slow
def test_capacity_follows_the_load_by_itself(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    options = ("--config", str(tmp_path / "cluster.yaml"), "--lora-dir", str(DEMO / "adapters"))

    async def play(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            asked = questions()
            right = {question: await answer(http, question) for question in asked}
            async with load(http, asked, 16, right):
                grown = await until(http, lambda m: m["moe_lora:lora_server_capacity"] > CAPACITY + 2)
                await until(http, lambda m: m["moe_lora:iar_predicted"] >= 0.9)
            async with load(http, asked[:4], 16, right):
                most = grown["moe_lora:lora_server_capacity"] - 2
                await until(http, lambda m: m["moe_lora:lora_server_capacity"] < most)

    with demo_server(tmp_path / "log", *options, "--set", "provision.auto_resize=true") as server:
        asyncio.run(play(server.url))


def test_limits_and_log_level_of_the_file_are_read_again_on_sighup(server):
    file = server.log.parent / "cluster.yaml"
    body = {"prompt": "a=", "max_tokens": 1, "n": 3}

    def status() -> int:
        return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False).status_code

    def reread(front_end: str, said: str) -> None:
        file.write_text(CLUSTER + front_end)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: said in server.log.read_text(), said)

    assert status() == 200
    reread(
        "front_end: {max_choices: 2, log_level: warning}\n", "read again: log_level=warning, max_choices=2"
    )
    wait_until(
        lambda: server.log.read_text().count("log_level is warning") == 3,
        "the instance and both ranks are told",
    )
    assert status() == 400
    reread("front_end: {max_choices: none}\n", "can't be read again and stay as they are")
    assert status() == 400
    reread("front_end: {max_choices: 4, drain_s: 7}\n", "read again: log_level=info, max_choices=4")
    wait_until(lambda: "restart it for those" in server.log.read_text(), "drain_s is not taken over silently")
    assert status() == 200


def test_running_server_is_resized_within_its_memory(server):
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for capacity in (CAPACITY + 1, CAPACITY):
            response = http.post("/v1/lora_server/capacity", json={"capacity": capacity})
            assert response.json()["capacity"] == capacity
            assert http.get("/v1/lora_server").json()["capacity"] == capacity
        limit = http.get("/v1/lora_server").json()["max_capacity"]
        response = http.post("/v1/lora_server/capacity", json={"capacity": limit + 1})
        assert response.status_code == 400
        assert f"holds, which is {limit} adapters of the mean size" in response.json()["error"]["message"]
