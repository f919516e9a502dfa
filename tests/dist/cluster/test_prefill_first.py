# SPDX-License-Identifier: Apache-2.0
"""Prompts on instances of their own: where requests go, and that answers stay the same."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from anyio import fail_after

from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import ConfigError, MoveError
from moe_lora.core.request import TokenOutput
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.prefill_first import PrefillFirstClient
from moe_lora.dist.cluster.routing_client import FleetClient, make_client
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import REQUEST_METHODS, Call, Command
from moe_lora.engine.moving import KvTransfer
from moe_lora.engine.sequence import Sequence
from moe_lora.policies.routing.routers import LeastOutstanding
from tests.dist.cluster.fleet_parts import CountingEngine
from tests.dist.cluster.test_migration import (
    ADAPTERS,
    AHEAD,
    CONFIG,
    LENGTH,
    PROMPT,
    Brake,
    answer,
    ask,
    logprobs,
    place,
    tokens,
    until_idle,
)
from tests.dist.cluster.test_resolving import until
from tests.dist.cluster.test_switched_moves import FOLDERS, MODEL
from tests.engine.publishing import check_greedy, runs_of
from tests.grids import diagonal
from tests.patience import PATIENCE_S

PREFILL, DECODE = "0", "1"


def over_a_link(client: InProcessClient):
    """Sends as the instance's end of a link does: calls about a move may be answered beside a step."""
    inbox = client._loop.inbox

    def send(command: Command) -> None:
        is_of_move = isinstance(command, Call) and command.method in REQUEST_METHODS
        if not (is_of_move and inbox.answers(command)):
            inbox.put(command)

    return send


@pytest.fixture(scope="module")
def engines() -> Iterator[list[InProcessClient]]:
    settings = [replace(CONFIG, instance=name, async_scheduling="off") for name in (PREFILL, DECODE)]
    clients = [InProcessClient(build_engine(one)) for one in settings]
    for client in clients:
        client._send = over_a_link(client)
    yield clients
    for client in clients:
        client.shut_down()


def made(engines, *, prefill: tuple[str, ...] = (PREFILL,)) -> FleetClient:
    """A client of a cluster's front end, made from its settings."""
    front_end = FrontEndConfig(prefill_instances=prefill, engines_address="/run/engines")
    cluster = ClusterConfig(
        engine=EngineConfig(model_dir="base"), served_model_name="base", front_end=front_end
    )
    registry = InstanceRegistry(engines, ADAPTERS)
    routes = Routes(config=front_end, router=LeastOutstanding(), meter=None, ranks={})
    return make_client(cluster, registry, routes, FleetAdapters(registry, routes.ranks).call)


async def moved_answer(fleet: FleetClient, name: str, **sampling) -> list[TokenOutput]:
    """The outputs of a request that takes no further steps while its move is under way."""
    outputs = []
    with Brake(1 + AHEAD).on(fleet) as brake:
        async for output in fleet.generate(ask(name, **sampling)):
            if not outputs:
                assert place(fleet, name) == PREFILL
                await until(lambda: fleet._running[name].next is not None)
                brake.limit = LENGTH
            outputs.append(output)
    return outputs


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5}], ids=["greedy", "sampled"]
)
def test_answer_goes_on_with_its_kv_at_a_decode_instance_with_equal_bits(engines, sampling):
    async def both() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone", **sampling))
        fleet = made(engines)
        moved = await moved_answer(fleet, "moved", **sampling)
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        assert len(moved[0].token_ids) == 1

    asyncio.run(both())


@contextmanager
def long_step(client: InProcessClient) -> Iterator[threading.Event]:
    """The engine's steps from the second on last until the event."""
    over, step, num_steps = threading.Event(), client.core.step, 0

    def wait_and_step() -> list[TokenOutput]:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 1:
            over.wait()
        return step()

    with patch.object(client.core, "step", wait_and_step):
        try:
            yield over
        finally:
            over.set()


def test_move_waits_for_no_step_of_the_prefill_instance(engines):
    async def run() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone"))
        fleet, moved = made(engines), []
        with long_step(engines[0]):
            async for output in fleet.generate(ask("moved")):
                moved.append(output)
                if len(tokens(moved)) == 10:
                    assert place(fleet, "moved") == DECODE
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        await until_idle(engines)

    asyncio.run(run())


@pytest.mark.parametrize(("ahead", "sampling"), diagonal(("off", "on"), ({"bad_word_ids": ((50, 51),)}, {})))
def test_kept_request_gains_no_token_beside_later_prompts_until_it_goes_on(ahead, sampling):
    client = InProcessClient(build_engine(replace(CONFIG, async_scheduling=ahead)))

    async def run() -> None:
        alone = [one async for one in client.generate(ask("alone", **sampling))]
        stream = client.generate(replace(ask("kept", **sampling), prefill_only=True))
        kept = [await anext(stream)]
        assert len(tokens([one async for one in client.generate(ask("beside"))])) == LENGTH
        [load] = await client.call("request_loads")
        assert (load.num_generated, load.held) == (1, True)
        await client.call("resume_request", "kept", (), 0, 0, False)
        kept += [one async for one in stream]
        assert tokens(kept) == tokens(alone)
        short = [one async for one in client.generate(replace(ask("short", max_tokens=1), prefill_only=True))]
        assert len(tokens(short)) == 1

    try:
        asyncio.run(run())
    finally:
        client.shut_down()


def test_target_that_gets_the_first_token_from_its_source_is_not_kept(engines):
    """A move of a waiting prompt may end after the source's first token: nobody resumes the target then."""

    async def run() -> None:
        alone = [one async for one in engines[1].generate(ask("alone"))]
        stream = engines[1].generate(replace(ask("target"), prefill_only=True, held=True))
        with fail_after(PATIENCE_S):
            assert (await anext(stream)).token_ids == ()
            await engines[1].call("resume_request", "target", tuple(tokens(alone)[:1]), 0, 0, False)
            assert tokens([one async for one in stream]) == tokens(alone)[1:]

    asyncio.run(run())


def test_kept_request_that_is_aborted_during_its_move_is_moved_no_more(engines, monkeypatch):
    asked: list[str] = []

    async def run() -> None:
        fleet, call, ended = made(engines), engines[1].call, []

        async def abort_meanwhile(verb: str, *args: Any) -> Any:
            if verb != "kv_window":
                return await call(verb, *args)
            asked.append(verb)
            ended.append(asyncio.create_task(fleet.abort("r")))
            return await asyncio.Event().wait()

        monkeypatch.setattr(engines[1], "call", abort_meanwhile)
        outputs = []
        async for output in fleet.generate(ask()):
            if not outputs:
                await until(lambda: ended and ended[0].done() and not fleet.mover._tasks)
            outputs.append(output)
        assert outputs[-1].finish_reason == "abort"
        assert (fleet.mover.num_failed, asked) == (1, ["kv_window"])
        await until_idle(engines)

    asyncio.run(run())


def test_plain_requests_make_no_part_of_a_move():
    client = InProcessClient(build_engine(CONFIG))

    async def run() -> None:
        assert len(tokens([one async for one in client.generate(ask())])) == LENGTH

    try:
        asyncio.run(run())
        assert client.core._moves is None
    finally:
        client.shut_down()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_answer_whose_move_failed_goes_on_and_is_moved_once_more(engines, monkeypatch, caplog, num_failures):
    failures = ["out of windows"] * num_failures

    async def refuse(call: Any, verb: str, *args: Any) -> Any:
        if verb == "resume_request" and failures:
            raise MoveError(failures.pop())
        return await call(verb, *args)

    async def run() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone"))
        fleet, moved, call = made(engines), [], engines[1].call
        monkeypatch.setattr(engines[1], "call", lambda *args: refuse(call, *args))
        with Brake(1 + AHEAD).on(fleet) as brake:
            async for output in fleet.generate(ask("moved")):
                if not moved:
                    await until(lambda: not fleet.mover._tasks)
                    brake.limit = LENGTH
                moved.append(output)
        assert tokens(moved) == tokens(alone)
        assert fleet.mover.num_failed == num_failures
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 2 - num_failures}
        assert caplog.text.count("could not be moved to 1: out of windows") == num_failures
        await until_idle(engines)

    with caplog.at_level("INFO", "moe_lora"):
        asyncio.run(run())


def test_request_kept_where_the_last_decode_instance_has_gone_goes_on(engines):
    async def run() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone"))
        fleet, found = made(engines), []
        async for output in fleet.generate(ask()):
            if not found:
                attempt = fleet._running["r"].attempt
                assert attempt is not None
                assert attempt.request.prefill_only
            found.append(output)
        assert tokens(found) == tokens(alone)

    kinds = iter([{True, False}, {True}])
    with patch.object(PrefillFirstClient, "_kinds", lambda *_: next(kinds)):
        asyncio.run(run())


@pytest.mark.slow
def test_publication_while_kv_is_sent_mixes_no_versions(engines):
    send = KvTransfer.send

    def publish_and_send(self: KvTransfer, sequence: Sequence, *args: Any) -> Any:
        if self is engines[0].core.moves._kv and not published:
            published.append(True)
            new = ("policy", str(FOLDERS[2]), True, 2)
            engines[0].start_call("load_adapter", *new).result()
            while sequence.num_computed < len(PROMPT):  # again, with the new version
                time.sleep(0.001)
        return send(self, sequence, *args)

    async def run() -> list[TokenOutput]:
        fleet = made(engines)
        outputs: list[TokenOutput] = []
        await fleet.call("load_adapter", "policy", str(FOLDERS[1]))
        with Brake(1 + AHEAD).on(fleet) as brake:
            async for output in fleet.generate(ask(adapter="policy", on_publish="switch")):
                if not outputs:
                    await until(lambda: not fleet.mover._tasks)
                    brake.limit = LENGTH
                outputs.append(output)
        await until_idle(engines)
        await fleet.call("unload_adapter", "policy")
        return outputs

    published: list[bool] = []
    with patch.object(KvTransfer, "send", publish_and_send):
        outputs = asyncio.run(run())
    assert len(tokens(outputs)) == LENGTH
    check_greedy(MODEL, FOLDERS, PROMPT, runs_of(outputs))


def test_answer_of_one_token_and_an_aborted_one_do_not_move(engines):
    async def ended() -> None:
        fleet = made(engines)
        assert len(tokens(await answer(fleet, ask("short", max_tokens=1)))) == 1
        assert fleet._mover is None
        with Brake(1 + AHEAD).on(fleet):
            async for output in fleet.generate(ask("left")):
                await fleet.abort("left")
                if output.finish_reason:
                    assert output.finish_reason == "abort"
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 0}

    asyncio.run(ended())


def test_each_kind_does_the_work_of_the_other_where_that_is_gone():
    async def served(engines, prefill: tuple[str, ...]) -> FleetClient:
        fleet = made(engines, prefill=prefill)
        for engine, instance in zip(engines, fleet.instances, strict=True):
            engine.adapters["upper"] = "path"
            if not engine.alive:
                instance.live = False
        outputs = [one async for one in fleet.generate(ask("r", max_tokens=4))]
        assert tokens(outputs) == [len(PROMPT) + n for n in range(4)]
        return fleet

    def dead() -> CountingEngine:
        return CountingEngine(alive=False)

    for engines in ([CountingEngine(), dead()], [dead(), CountingEngine()]):
        fleet = asyncio.run(served(engines, (PREFILL,)))
        assert fleet._mover is None, "there is no instance of the other kind"


def test_answer_stays_where_no_decode_instance_has_its_adapter():
    async def served() -> FleetClient:
        engines = [CountingEngine(), CountingEngine()]
        engines[0].adapters["upper"] = "path"
        fleet = made(engines)
        fleet.instances[1].missing.add("upper")
        assert len(tokens([one async for one in fleet.generate(ask("r", max_tokens=4))])) == 4
        return fleet

    assert asyncio.run(served())._mover is None


def test_answer_continues_at_a_decode_instance_when_its_own_dies():
    """The prefill instance has died, another one is alive; the answer has begun."""
    engines = [CountingEngine(dies_at=len(PROMPT) + 2), CountingEngine(), CountingEngine()]
    for engine in engines:
        engine.adapters["upper"] = "path"

    async def lost() -> list[int]:
        fleet = made(engines, prefill=("0", "2"))
        fleet.instances[2].outstanding_tokens = -100  # routing alone would choose it
        fleet.instances[0].outstanding_tokens = -200
        return tokens([one async for one in fleet.generate(ask("r", max_tokens=6))])

    assert asyncio.run(lost()) == [len(PROMPT) + n for n in range(6)]
    assert len(engines[0].requests) == 1
    assert engines[1].requests
    assert not engines[2].requests


def test_request_whose_instance_died_is_not_moved_from_there(monkeypatch):
    """Its failover is under way, and a move would send it once more under the same id."""
    engines = [CountingEngine(dies_at=len(PROMPT) + 2), CountingEngine(), CountingEngine()]
    for engine in engines:
        engine.adapters["upper"] = "path"
    lose, problems = FleetClient._lose, []

    async def lose_and_move(self: FleetClient, *args: Any) -> None:
        await lose(self, *args)
        with pytest.raises(MoveError, match="between two instances") as raised:
            await self.move("r", "2")
        problems.append(raised)

    async def lost() -> list[int]:
        fleet = made(engines, prefill=())
        return tokens([one async for one in fleet.generate(ask("r", max_tokens=6))])

    monkeypatch.setattr(FleetClient, "_lose", lose_and_move)
    assert asyncio.run(lost()) == [len(PROMPT) + n for n in range(6)]
    assert len(problems) == 1


def cluster(
    engine: EngineConfig | None = None,
    sources: SourcesConfig | None = None,
    lora_server: LoraServerConfig | None = None,
    **front_end,
):
    engine = engine or EngineConfig(model_dir="base", num_instances=2)
    front_end.setdefault("prefill_instances", ("instance-0",))
    return ClusterConfig(
        engine=engine,
        served_model_name="base",
        front_end=FrontEndConfig(**front_end),
        sources=sources,
        lora_server=lora_server,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"migration": "dlora"}, "prefill_instances and front_end.migration do not go together"),
        ({"placement": "loraserve"}, "prefill_instances and front_end.placement do not go together"),
        (
            {"sources": SourcesConfig(resolver="/adapters")},
            "prefill_instances and sources.resolver do not go together",
        ),
        (
            {"engine": EngineConfig(model_dir="base", num_instances=2, expert_parallel=2)},
            "prefill_instances and instances of several ranks do not go together",
        ),
        (
            {"lora_server": LoraServerConfig(device_puts="ibgda")},
            "prefill_instances and lora_server.device_puts do not go together",
        ),
        ({"prefill_instances": ("instance-2",)}, "'instance-2' is none of instance-0, instance-1"),
        ({"prefill_instances": ("instance-0", "instance-1")}, "leaves no instance for answers"),
    ],
)
def test_impossible_settings_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        cluster(**given)


def test_names_of_other_hosts_are_not_known():
    cluster(prefill_instances=("of-another-host",), engines_address="10.0.0.1:7600")
