# SPDX-License-Identifier: Apache-2.0
"""Prompts on instances of their own: where requests go, and that answers stay the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import TokenOutput
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.routing_client import FleetClient, make_client
from moe_lora.engine.build import build_engine
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
)
from tests.dist.cluster.test_resolving import until

PREFILL, DECODE = "0", "1"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[InProcessClient]]:
    clients = [InProcessClient(build_engine(replace(CONFIG, instance=name))) for name in (PREFILL, DECODE)]
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
        fleet.instances[2].asked_tokens = -100  # the least loaded, so that routing alone would choose it
        fleet.instances[0].asked_tokens = -200
        return tokens([one async for one in fleet.generate(ask("r", max_tokens=6))])

    assert asyncio.run(lost()) == [len(PROMPT) + n for n in range(6)]
    assert len(engines[0].requests) == 1
    assert engines[1].requests
    assert not engines[2].requests


def cluster(engine: EngineConfig | None = None, sources: SourcesConfig | None = None, **front_end):
    engine = engine or EngineConfig(model_dir="base", num_instances=2)
    front_end.setdefault("prefill_instances", ("instance-0",))
    return ClusterConfig(
        engine=engine, served_model_name="base", front_end=FrontEndConfig(**front_end), sources=sources
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
        ({"prefill_instances": ("instance-2",)}, "'instance-2' is none of instance-0, instance-1"),
        ({"prefill_instances": ("instance-0", "instance-1")}, "leaves no instance for answers"),
    ],
)
def test_impossible_settings_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        cluster(**given)


def test_names_of_other_hosts_are_not_known():
    cluster(prefill_instances=("of-another-host",), engines_address="10.0.0.1:7600")
