# SPDX-License-Identifier: Apache-2.0
"""Moves and failover of answers under `on_publish="switch"`: no KV and no token of a version goes astray."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import patch

import pytest

from moe_lora.core.errors import MoveError
from moe_lora.core.request import TokenOutput
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.policies.routing.routers import RoundRobin
from tests.engine.publishing import check_greedy, runs_of

from .test_fleet import NumberedEngine, fleet_of
from .test_fleet import ask as ask_of
from .test_migration import (  # noqa: F401
    AHEAD,
    DEMO,
    LENGTH,
    PROMPT,
    Brake,
    ask,
    engines,
    fleet,
    place,
    tokens,
    until_idle,
)

MODEL = DEMO / "model"
FOLDERS = {1: DEMO / "adapters" / "upper", 2: DEMO / "adapters" / "reverse"}
PLACES = {"source": ("source",), "target": ("target",), "both": ("source", "target")}


async def moved(fleet: FleetClient, kind: str, published: tuple[str, ...], after_hold: bool) -> Any:  # noqa: F811
    """Outputs of an answer that moves after ten tokens, and the move's problem.

    published: engines with a new version just before or after the source's hold.
    """
    outputs: list[TokenOutput] = []
    problem = None
    clients = {one.name: one.client for one in fleet._instance_registry.instances}

    async def publish(source: str) -> None:
        for where in published:
            name = source if where == "source" else str(1 - int(source))
            path = str(FOLDERS[2])
            await clients[name].call("load_adapter", "policy", path, replace=True, version=2)

    def publishing(name: str, call: Any) -> Any:
        async def called(verb: str, *args: Any, **words: Any) -> Any:
            if verb == "hold_request" and not after_hold:
                await publish(name)
            found = await call(verb, *args, **words)
            if verb == "hold_request" and after_hold:
                await publish(name)
            return found

        return called

    with Brake(10 + AHEAD).on(fleet) as brake:
        async with AsyncExitStack() as stack:
            for name, client in clients.items():
                stack.enter_context(patch.object(client, "call", publishing(name, client.call)))
            async for output in fleet.generate(ask(adapter="policy", on_publish="switch")):
                outputs.append(output)
                if brake.limit < LENGTH and len(tokens(outputs)) >= 10:
                    try:
                        await fleet.move("r", str(1 - int(place(fleet))), kind)
                    except MoveError as error:
                        problem = str(error)
                    brake.limit = LENGTH
    return outputs, problem


@pytest.mark.parametrize(
    ("kind", "where", "after_hold"),
    [
        # The default run has each pair of two values.
        pytest.param(kind, where, after_hold, marks=pytest.mark.slow if (i + j + k) % 2 else ())
        for i, kind in enumerate(["tokens", "kv"])
        for j, where in enumerate(PLACES)
        for k, after_hold in enumerate([False, True])
    ],
)
def test_a_publication_during_a_move_mixes_no_versions(fleet, engines, kind, where, after_hold):  # noqa: F811
    async def run() -> tuple[list[TokenOutput], str | None]:
        await fleet.call("load_adapter", "policy", str(FOLDERS[1]))
        try:
            return await moved(fleet, kind, PLACES[where], after_hold)
        finally:
            await until_idle(engines)
            await fleet.call("unload_adapter", "policy")

    outputs, problem = asyncio.run(run())
    runs = runs_of(outputs)
    check_greedy(MODEL, FOLDERS, PROMPT, runs)
    assert len(tokens(outputs)) == LENGTH
    if where != "target":
        assert (problem is not None) == (not after_hold)
    elif kind == "tokens":
        assert problem is None
    last_place = "target" if problem is None else "source"
    assert runs[-1][0] == (2 if last_place in PLACES[where] else 1)


@pytest.mark.parametrize("is_known", [False, True])
def test_the_rest_of_an_answer_whose_instance_ends_has_the_newest_version(is_known):
    """is_known: the front end knows of the new version already."""

    async def run() -> list[tuple[int, tuple[int, ...]]]:
        dying, other = (NumberedEngine(adapters={"a": "p"}) for _ in range(2))
        other.version = 2
        client = fleet_of(dying, other, router=RoundRobin())
        outputs = []
        async for output in client.generate(ask_of(adapter="a", on_publish="switch")):
            outputs.append(output)
            if len(outputs) == 3:
                if is_known:
                    await client.call("load_adapter", "a", "q", replace=True)
                dying.alive = False
        return runs_of(outputs)

    assert asyncio.run(run()) == [(1, (2, 3, 4)), (2, (5, 6, 7, 8, 9))]
