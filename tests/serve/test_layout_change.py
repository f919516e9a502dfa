# SPDX-License-Identifier: Apache-2.0
"""The LoRA Server of a running server changes its layout while requests run, and processes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.core.partition import Layout
from tests.dist.cluster_jobs import children
from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server, few_adapters
from .instance_parts import gone
from .live_server import wait_until

ADAPTERS = list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:6]
OPTIONS = (*few_adapters(*ADAPTERS), "--eager", "--dtype", "float32")
EXPERTS = ("--expert-parallel", "2")
TENSORS = (*EXPERTS, "--tensor-parallel", "2", "--set", "lora_server.sites=experts")
FRONT_ENDS = ("--front-ends", "2")
NUM_CLIENTS, NUM_QUESTIONS = 4, 8


@contextlib.contextmanager
def serving(folder, layout: str, *options: str) -> Iterator[DemoServer]:
    with demo_server(folder / "log", *OPTIONS, "--lora-server", layout, *options) as server:
        yield server


def question(number: int) -> tuple[str, str]:
    return ADAPTERS[number % len(ADAPTERS)], f"{'abcdefgh'[number:]}hello="


async def answer(http: httpx.AsyncClient, number: int) -> tuple[int, ...]:
    model, prompt = question(number)
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, "min_tokens": 12}
    response = await http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


@contextlib.asynccontextmanager
async def requests(url: str, right: dict[int, tuple[int, ...]]) -> AsyncIterator[httpx.AsyncClient]:
    """Meanwhile clients ask all the time, and check their answers; at the end each has asked."""
    over = asyncio.Event()

    async def client(http: httpx.AsyncClient, first: int) -> int:
        number = first
        while not over.is_set():
            assert await answer(http, number % NUM_QUESTIONS) == right[number % NUM_QUESTIONS]
            number += 1
        return number - first

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
        tasks = [asyncio.create_task(client(http, first)) for first in range(NUM_CLIENTS)]
        try:
            yield http
        finally:
            over.set()
            assert min(await asyncio.gather(*tasks)) > 0


async def change(http: httpx.AsyncClient, layout: str, status: int = 200) -> dict:
    response = await http.post(f"/v1/lora_server/layout?layout={layout}&limit_s={PATIENCE_S}")
    assert response.status_code == status, response.text
    return response.json()


@pytest.fixture(scope="module")
def right() -> dict[int, tuple[int, ...]]:
    """Answers of a local engine."""
    adapters = {name: str(DEMO / "adapters" / name) for name in ADAPTERS}
    sampling = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
    with LLM(DEMO / "model", adapters=adapters, dtype="float32", eager=True, num_threads=1) as llm:
        asked = [question(number) for number in range(NUM_QUESTIONS)]
        found = llm.generate([prompt for _, prompt in asked], [name for name, _ in asked], sampling)
    return {number: one.token_ids for number, one in enumerate(found)}


def ranks_of(server: DemoServer, layout: str) -> set[str]:
    """Started ranks of a layout that came later."""
    return set(re.findall(rf"{layout} lora-server-(\d+) started", server.log.read_text()))


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def check_all_is_remote(http: httpx.AsyncClient, server: DemoServer, right) -> None:
    """Every instance is at the server, and no row of an answer is computed by an instance."""

    async def linked() -> bool:
        state = (await http.get("/v1/lora_server")).json()
        return state["num_instances"] == len(server.engine_pids()) and not any(state["unlinked"])

    while not await linked():
        await asyncio.sleep(0.1)
    while True:
        before = await fallback_rows(http)
        for number in range(NUM_QUESTIONS):
            assert await answer(http, number) == right[number]
        if await fallback_rows(http) == before:
            return


async def fallback_rows(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    return float(re.findall(r"^moe_lora:lora_server_fallback_rows_total\S* (\S+)", text, re.MULTILINE)[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), EXPERTS, TENSORS, FRONT_ENDS], ids=" ".join)
def test_requests_go_on_with_the_tokens_of_a_local_engine_and_former_ranks_are_gone(tmp_path, right, options):
    """And a process of an instance that starts later is at the last server."""

    async def play(server: DemoServer) -> None:
        async with requests(server.url, right) as http:
            before = server.lora_server_pids()
            (await http.post("/v1/lora_server/capacity", json={"capacity": 5})).raise_for_status()
            for layout, num_ranks in (("EP4-PP1", 4), ("EP2-PP1", 2)):
                state = await change(http, layout)
                assert (state["ranks"], state["unlinked"]) == ([1] * num_ranks, [0] * num_ranks)
                assert (state["num_instances"], state["capacity"]) == (1, 5)
                now = server.lora_server_pids()
                assert len(now) == num_ranks
                assert not set(now) & set(before)
                before = now
            assert (await change(http, "EP2-PP1"))["incarnation"] == state["incarnation"]
            for wrong, why in (
                ("EP3", "does not divide num_experts"),
                ("PP99", "99 stages"),
                ("two", "no layout"),
            ):
                assert why in (await change(http, wrong, 400))["error"]["message"]
            assert server.lora_server_pids() == now
            assert await fallback_rows(http) == 0
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as http:
            [engine] = server.engine_pids()
            os.kill(engine, signal.SIGKILL)
            await until(lambda: server.engine_pids() not in ([engine], []), "the instance is started again")
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.1)
            await check_all_is_remote(http, server, right)

    with serving(tmp_path, "EP2-PP1", *options) as server:
        asyncio.run(play(server))
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_kills_in_the_middle_of_changes_cost_no_request(tmp_path, right):
    """Of a starting rank, of an instance that is to move, of a former rank, and of the next leader."""
    layouts = itertools.cycle(("EP4-PP1", "EP2-PP1"))

    async def play(server: DemoServer) -> None:
        async def kill(last: str, when: str) -> None:
            """Kill the last started process of a name once the log goes on with `when`."""
            await until_log_goes_on(server, when)
            pids = re.findall(rf"{last} started \(process (\d+)\)", server.log.read_text())
            os.kill(int(pids[-1]), signal.SIGKILL)

        former = "EP2-PP1"
        async with requests(server.url, right) as http:
            for victim, when in (
                ("{now} lora-server-1", "{now} lora-server-1 started"),
                ("instance-0", "ranks of {now} are ready"),
                ("{former} lora-server-1", "ranks of {now} are ready"),
                ("{now} lora-server-0", "ranks of {now} are ready"),
                ("instance-1", "{now} lora-server-0 started"),
            ):
                now = next(layouts)
                names = {"now": now, "former": former}
                killed = asyncio.create_task(kill(victim.format(**names), when.format(**names)))
                await change(http, now)
                await killed
                await check_all_is_remote(http, server, right)
                assert len(server.lora_server_pids()) == Layout.parse(now).num_ranks
                former = now

    with serving(tmp_path, "EP2-PP1", "--instances", "2") as server:
        asyncio.run(play(server))


async def until_log_goes_on(server: DemoServer, when: str) -> None:
    await until_said(server, len(server.log.read_text()), when)


@pytest.mark.slow
def test_a_killed_follower_in_the_middle_of_a_change_costs_no_request(tmp_path, right):
    """Its instance starts again with the next layout, while the other instance serves."""

    async def kill(server: DemoServer, layout: str) -> None:
        await until_log_goes_on(server, f"ranks of {layout} are ready")
        [follower] = followers(server.engine_pids()[0])
        os.kill(follower, signal.SIGKILL)

    async def play(server: DemoServer) -> None:
        async with requests(server.url, right) as http:
            for layout in ("EP4-PP1", "EP2-PP1"):
                killed = asyncio.create_task(kill(server, layout))
                await change(http, layout)
                await killed
                await check_all_is_remote(http, server, right)
                assert len(server.lora_server_pids()) == Layout.parse(layout).num_ranks

    with serving(tmp_path, "EP2-PP1", *EXPERTS, "--instances", "2") as server:
        asyncio.run(play(server))


def followers(engine: int) -> list[int]:
    """Processes of the instance's other ranks."""
    return [
        one
        for one in children(engine)
        if b"engine.ranks.follower" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_a_change_goes_on_after_the_end_of_the_controller(tmp_path, right):
    async def play(server: DemoServer) -> None:
        async with requests(server.url, right) as http:
            for layout in ("EP4-PP1", "EP2-PP1"):
                ready = asyncio.create_task(until_log_goes_on(server, f"{layout} lora-server-1 started"))
                changed = asyncio.create_task(change(http, layout, 503))
                await ready
                [*_, controller] = re.findall(r"controller started \(process (\d+)\)", server.log.read_text())
                os.kill(int(controller), signal.SIGKILL)
                await changed
                num_ranks = Layout.parse(layout).num_ranks
                await until(
                    lambda num=num_ranks: len(server.lora_server_pids()) == num, "the former ranks end"
                )
                while len((await state_of(http)).get("ranks", ())) != num_ranks:
                    await asyncio.sleep(0.1)
                await check_all_is_remote(http, server, right)

    with serving(tmp_path, "EP2-PP1", *FRONT_ENDS, "--instances", "2") as server:
        asyncio.run(play(server))


@pytest.mark.slow
def test_no_instance_is_left_at_ended_ranks_after_a_kill_of_the_controller_while_instances_move(
    tmp_path, right
):
    """Twice with a limit that may end the change in the middle of the moves, then with a long one."""

    async def play(server: DemoServer) -> None:
        async with requests(server.url, right) as http:
            for layout in ("EP4-PP1", "EP2-PP1"):
                await change(http, layout)
            starts_s = map(float, re.findall(r"are ready after ([\d.]+)", server.log.read_text()))
            short_s, former = max(starts_s) + 2, "EP2-PP1"
            for limit_s in (short_s, short_s, PATIENCE_S):
                layout = {"EP2-PP1": "EP4-PP1", "EP4-PP1": "EP2-PP1"}[former]
                where = f"/v1/lora_server/layout?layout={layout}&limit_s={limit_s}"
                said = len(server.log.read_text())
                changed = asyncio.create_task(http.post(where))
                await until_said(server, said, rf"ranks of {layout} are ready|the change ends")
                [*_, controller] = re.findall(r"controller started \(process (\d+)\)", server.log.read_text())
                os.kill(int(controller), signal.SIGKILL)
                await changed
                former = await until_said(server, said, r"the change ends: the LoRA Server is (\S+)")
                await check_all_is_remote(http, server, right)
                assert len(server.lora_server_pids()) == Layout.parse(former).num_ranks

    with serving(tmp_path, "EP2-PP1", *FRONT_ENDS, *EXPERTS, "--instances", "2") as server:
        asyncio.run(play(server))


async def until_said(server: DemoServer, said: int, what: str) -> str:
    """The last group of `what` in the log after `said` characters."""

    def found() -> re.Match[str] | None:
        return re.search(what, server.log.read_text()[said:])

    await until(lambda: found() is not None, what)
    return found()[found().re.groups]


async def state_of(http: httpx.AsyncClient) -> dict:
    return (await http.get("/v1/lora_server")).json()


@pytest.mark.slow
def test_a_server_that_is_killed_while_ranks_start_leaves_none(tmp_path):
    with serving(tmp_path, "EP1-PP1") as server:

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                where = f"{server.url}/v1/lora_server/layout?layout=EP2-PP1"
                httpx.post(where, trust_env=False, timeout=PATIENCE_S)

        with ThreadPoolExecutor(1) as asking:
            asking.submit(ask)
            wait_until(lambda: len(ranks_of(server, "EP2-PP1")) == 2, "ranks start")
            server.process.kill()
        started = re.findall(r"started \(process (\d+)\)", server.log.read_text())
        assert len(started) >= 4
        wait_until(lambda: all(gone(int(pid)) for pid in started), "all processes end")
