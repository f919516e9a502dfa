# SPDX-License-Identifier: Apache-2.0
"""KV of a prompt of several steps goes to a decode instance while later steps are computed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from anyio import fail_after

from moe_lora.api import InProcessClient
from moe_lora.core.errors import EngineDeadError, PeerGoneError
from moe_lora.core.request import GenerateRequest, TokenOutput, token_work
from moe_lora.dist.cluster import migration
from moe_lora.dist.cluster.migration import RequestMover
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import PauseScope
from moe_lora.engine.core import EngineCore
from moe_lora.engine.moving import KvTransfer
from tests.engine.publishing import check_greedy, runs_of
from tests.grids import diagonal, with_quick
from tests.patience import PATIENCE_S

from .test_migration import CONFIG, PROMPT, SAMPLINGS, answer, logprobs, tokens, until_idle
from .test_migration import ask as ask_long
from .test_prefill_first import DECODE, PREFILL, made, over_a_link
from .test_switched_moves import FOLDERS, MODEL

CHUNK = 16
"""Tokens of a step, and of a page."""
NUM_TOKENS = 12
UNMOVED = {"tokens": 0, "kv": 0}


@contextmanager
def both_engines(**decode: Any) -> Iterator[list[InProcessClient]]:
    """decode: settings of the decode instance."""
    config = replace(CONFIG, max_num_batched_tokens=CHUNK, async_scheduling="off", prefix_caching=False)
    configs = [replace(config, instance=PREFILL), replace(config, instance=DECODE, **decode)]
    clients = [InProcessClient(build_engine(one)) for one in configs]
    for client in clients:
        client._send = over_a_link(client)
    try:
        yield clients
    finally:
        for client in clients:
            client.shut_down()


@pytest.fixture(autouse=True)
def moves_have_time(monkeypatch):
    """A busy machine is slow: the answer went on at the prompt's instance after 5 s."""
    monkeypatch.setattr(migration, "ACK_S", PATIENCE_S)
    monkeypatch.setattr(migration, "READY_S", PATIENCE_S)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[InProcessClient]]:
    with both_engines() as clients:
        yield clients


def ask(name: str = "r", **words: Any) -> GenerateRequest:
    return ask_long(name, **{"max_tokens": NUM_TOKENS, **words})


@contextmanager
def stopped_at(core: EngineCore, num_tokens: int) -> Iterator[threading.Event]:
    """The engine computes nothing while a prompt has so many computed tokens, until the event."""
    go_on, step = threading.Event(), core.step

    def step_or_wait() -> list[TokenOutput]:
        prompts = [one for one in core._sequences.values() if not one.num_generated]
        if go_on.is_set() or all(one.num_computed < num_tokens for one in prompts):
            return step()
        time.sleep(0.001)
        core.tend()
        core.stalled = False
        return core.catch_up() + core.moves.announce()

    with patch.object(core, "step", step_or_wait):
        try:
            yield go_on
        finally:
            go_on.set()


async def until(condition: Callable[[], object], reading: asyncio.Task[Any]) -> None:
    with fail_after(PATIENCE_S):
        while not condition():
            assert not reading.done(), "the answer is over"
            await asyncio.sleep(0.001)


def num_received(engines: list[InProcessClient]) -> int:
    """Pages in the decode instance's windows."""
    incoming = engines[1].core.moves._kv._incoming
    return sum(one.window.read_signal(0) for one in list(incoming.values()))


async def handed_over(
    engines: list[InProcessClient],
    fleet: FleetClient,
    request: GenerateRequest,
    meanwhile: Callable[[asyncio.Task[Any]], Awaitable[Any]] | None = None,
    num_pages: int = 2,
) -> list[TokenOutput]:
    """The outputs of a request, whose first pages were at the decode instance before its last step.

    meanwhile: awaited between both, with the task that reads.
    """

    async def read() -> list[TokenOutput]:
        return [output async for output in fleet.generate(request)]

    with stopped_at(engines[0].core, num_pages * CHUNK) as go_on:
        reading = asyncio.create_task(read())
        await until(lambda: num_received(engines) == num_pages, reading)
        assert not fleet._running[request.request_id].delivered
        if meanwhile is not None:
            await meanwhile(reading)
        go_on.set()
        return await reading


async def call_in_loop(client: InProcessClient, work: Callable[[], None]) -> None:
    """Run `work` in the engine's thread."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    client._loop.inbox.put(run)
    while not done.is_set():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "grammar"])
def test_pages_of_finished_steps_leave_before_the_first_token(engines, sampling):
    finish, taken = KvTransfer.finish_taking, []

    def note(self: KvTransfer, request_id: str, *sent: int) -> bool:
        taken.append((self._incoming[request_id].num_taken, *sent))
        return finish(self, request_id, *sent)

    async def run() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone", **sampling))
        fleet = made(engines)
        source = fleet.instances[0]
        request = ask("moved", **sampling)

        async def until_taken(reading: asyncio.Task[Any]) -> None:
            assert source.outstanding_tokens == token_work(request, 256), "the prompt is not computed yet"
            [incoming] = engines[1].core.moves._kv._incoming.values()
            await until(lambda: incoming.num_taken == 2, reading)

        with patch.object(KvTransfer, "finish_taking", note):
            moved = await handed_over(engines, fleet, request, until_taken)
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert all(one.token_ids or one.finish_reason for one in moved), "a client sees no sign of a step"
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        [(num_taken, num_tokens, first_page)] = taken
        assert num_tokens == len(PROMPT)
        assert num_taken >= 2
        assert first_page >= num_taken, "no page is copied twice"
        assert [one.outstanding_tokens for one in fleet.instances] == [0, 0]
        await until_idle(engines)

    asyncio.run(run())


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 1}, {"prompt_logprobs": 1, "max_tokens": 3}], ids=["one token", "report"]
)
def test_prompt_that_stays_or_is_computed_again_is_not_sent_ahead(engines, monkeypatch, changes):
    ahead = []
    monkeypatch.setattr(RequestMover, "move_ahead", lambda *_: ahead.append(True))

    async def run() -> None:
        outputs = await answer(made(engines), ask(**changes))
        assert len(tokens(outputs)) == changes["max_tokens"]
        await until_idle(engines)

    asyncio.run(run())
    assert not ahead


@pytest.mark.parametrize(("num_pages", "leaves"), diagonal((1, 2), (False, True)))
def test_prompt_that_ends_during_its_transfer_frees_both_instances(engines, num_pages, leaves):
    async def run() -> None:
        fleet = made(engines)

        async def end(reading: asyncio.Task[Any]) -> None:
            if leaves:
                reading.cancel()
            else:
                await fleet.abort("r")
            await until_idle(engines)

        try:
            outputs = await handed_over(engines, fleet, ask(), end, num_pages)
        except asyncio.CancelledError:
            assert leaves
        else:
            assert outputs[-1].finish_reason == "abort"
        assert fleet.mover.num_moved == UNMOVED
        assert [one.outstanding_tokens for one in fleet.instances] == [0, 0]

    asyncio.run(run())


async def lose_target(engines: list[InProcessClient], fleet: FleetClient) -> None:
    fleet._instance_registry.lose(fleet.instances[1], fleet.instances[1].client)


async def lose_source(engines: list[InProcessClient], fleet: FleetClient) -> None:
    source = fleet.instances[0]
    fleet._instance_registry.lose(source, source.client)
    engines[0]._sinks["r"](EngineDeadError("it has ended"))
    engines[0].abort_now("r")


async def lose_window(engines: list[InProcessClient], fleet: FleetClient) -> None:
    """The next page finds no window."""
    transport = engines[0].core.moves._kv._transport

    def gone(*_: Any) -> None:
        del transport.put_signal
        raise PeerGoneError("the window was freed")

    transport.put_signal = gone  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("lose", "num_kv"),
    [(lose_target, 0), (lose_source, 0), (lose_window, 1)],
    ids=["target", "source", "window"],
)
def test_answer_outlives_a_loss_during_the_transfer(engines, lose, num_kv):
    """Of the target: the source goes on; of the source: the other instance; of a window: it moves again."""

    async def run() -> None:
        alone = tokens(await answer(made(engines, prefill=()), ask("alone")))
        fleet = made(engines)
        moved = await handed_over(engines, fleet, ask(), lambda _: lose(engines, fleet), 1)
        assert tokens(moved) == alone
        assert fleet.mover.num_moved == {"tokens": 0, "kv": num_kv}
        assert fleet.mover.num_failed == 1
        await until_idle(engines)

    asyncio.run(run())


def test_preempted_prompt_sends_its_pages_again(engines):
    finish, taken = KvTransfer.finish_taking, []

    def note(self: KvTransfer, request_id: str, num_tokens: int, first_page: int) -> bool:
        taken.append((num_tokens, first_page))
        return finish(self, request_id, num_tokens, first_page)

    def preempt() -> None:
        core = engines[0].core
        [sequence] = core._sequences.values()
        core._scheduler.restart(sequence)

    async def run() -> None:
        alone = await answer(made(engines, prefill=()), ask("alone"))
        fleet = made(engines)
        with patch.object(KvTransfer, "finish_taking", note):
            moved = await handed_over(engines, fleet, ask(), lambda _: call_in_loop(engines[0], preempt))
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        assert taken == [(len(PROMPT), 0)], "the target copies the first pages again"
        await until_idle(engines)

    asyncio.run(run())


PLACES = {"source": (0,), "target": (1,), "both": (0, 1)}


async def publish(engines: list[InProcessClient], places: tuple[int, ...]) -> None:
    for place in places:
        await engines[place].call("load_adapter", "policy", str(FOLDERS[2]), replace=True, version=2)


async def published_meanwhile(
    engines: list[InProcessClient], where: str, on_publish: str
) -> tuple[FleetClient, list[TokenOutput], list[list[int]]]:
    """An answer with a publication during its transfer; answers of the prefill instance before and after."""
    fleet = made(engines)

    async def alone(name: str) -> list[int]:
        return tokens([one async for one in engines[0].generate(ask(name, adapter="policy"))])

    await fleet.call("load_adapter", "policy", str(FOLDERS[1]))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fleet.call, "unload_adapter", "policy")
        stack.push_async_callback(until_idle, engines)
        request = ask(adapter="policy", on_publish=on_publish)
        known = [await alone("before")]
        outputs = await handed_over(engines, fleet, request, lambda _: publish(engines, PLACES[where]))
        known.append(await alone("after"))
    return fleet, outputs, known


@pytest.mark.parametrize("where", with_quick(PLACES, {"both"}))
def test_answer_keeps_the_version_that_both_instances_hold(engines, where):
    fleet, outputs, (first, _) = asyncio.run(published_meanwhile(engines, where, "keep"))
    assert runs_of(outputs) == [(1, tuple(first))]
    assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}


@pytest.mark.parametrize("where", with_quick(PLACES, {"source"}))
def test_prompt_that_switches_during_its_transfer_mixes_no_versions(engines, where):
    """At the target alone, the answer goes on from the first token with the new version, or without it."""
    _, outputs, (_, second) = asyncio.run(published_meanwhile(engines, where, "switch"))
    runs = runs_of(outputs)
    if where == "target":
        assert len(tokens(outputs)) == NUM_TOKENS
        check_greedy(MODEL, FOLDERS, PROMPT, runs)
    else:
        assert runs == [(2, tuple(second))]


def test_target_with_another_version_takes_no_page(engines, monkeypatch, caplog):
    expected = []
    monkeypatch.setattr(KvTransfer, "expect", lambda *_: expected.append(True))

    async def run() -> None:
        alone = tokens(await answer(made(engines, prefill=()), ask("alone")))
        fleet = made(engines)
        path = CONFIG.adapters[0][1]
        await engines[1].call("load_adapter", "upper", path, replace=True, version=7)
        assert tokens(await answer(fleet, ask())) == alone
        await engines[1].call("load_adapter", "upper", path, replace=True, version=1)
        assert fleet.mover.num_moved == UNMOVED
        await until_idle(engines)

    with caplog.at_level("INFO", "moe_lora"):
        asyncio.run(run())
    assert "begun with version 1 of adapter 'upper', and version 7 is served here" in caplog.text
    assert not expected


async def read_there(engines: list[InProcessClient], *requests: GenerateRequest) -> list[list[int]]:
    """Answers of the decode instance alone."""

    async def read(request: GenerateRequest) -> list[int]:
        return tokens([one async for one in engines[1].generate(request)])

    with fail_after(PATIENCE_S):
        return await asyncio.gather(*map(read, requests))


@contextmanager
def computed_while_held(core: EngineCore) -> Iterator[list[int]]:
    """Numbers of tokens that the engine computes for held requests."""
    run, found = core._runner.run, []

    def note(plan: Any, *args: Any) -> Any:
        found.extend(item.num_tokens for item in plan if item.sequence.held)
        return run(plan, *args)

    with patch.object(core._runner, "run", note):
        yield found


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_early_kv_holds_no_seat_that_another_request_needs(max_num_seqs):
    """Of two seats, one stays free."""

    async def run(engines: list[InProcessClient]) -> None:
        alone = tokens(await answer(made(engines, prefill=()), ask("alone")))
        fleet = made(engines)

        async def meanwhile(reading: asyncio.Task[Any]) -> None:
            assert await read_there(engines, ask("other", adapter=None)) != [[]]
            assert not engines[1].core.sequences, "the other request ended the early move"

        moved = await handed_over(engines, fleet, ask(), meanwhile)
        assert tokens(moved) == alone
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        assert fleet.mover.num_failed == 0
        await until_idle(engines)

    with both_engines(max_num_seqs=max_num_seqs) as engines:
        asyncio.run(run(engines))


def test_early_kv_without_pages_leaves_and_is_not_computed():
    async def run(engines: list[InProcessClient]) -> None:
        alone = tokens(await answer(made(engines, prefill=()), ask("alone")))
        fleet, core = made(engines), engines[1].core
        others = [ask(f"other{place}", adapter=None, max_tokens=200) for place in range(3)]
        assert 3 * (len(PROMPT) + 200) > core.info.num_kv_blocks * CHUNK, "all pages are needed"

        async def meanwhile(reading: asyncio.Task[Any]) -> None:
            found = await read_there(engines, *others)
            assert [len(one) for one in found] == [200] * 3
            await read_there(engines, ask("last", adapter=None))
            assert not core.sequences, "the other requests ended the early move"

        with computed_while_held(core) as computed:
            moved = await handed_over(engines, fleet, ask(), meanwhile)
        assert not computed
        assert tokens(moved) == alone
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 1}
        assert fleet.mover.num_failed == 0
        await until_idle(engines)

    with both_engines(arena_mb=1.2) as engines:
        asyncio.run(run(engines))


async def pause(engines: list[InProcessClient], fleet: FleetClient) -> None:
    await engines[0].call("pause_requests", PauseScope(), "keep", PATIENCE_S)


async def drain(engines: list[InProcessClient], fleet: FleetClient) -> None:
    fleet._instance_registry.drains.order(DECODE, drained=True)


@pytest.mark.parametrize(("stop", "num_kv"), [(pause, 1), (drain, 0)], ids=["pause", "drain"])
def test_paused_prompt_and_drained_target_end_the_early_move(engines, stop, num_kv):
    async def run() -> None:
        alone = tokens(await answer(made(engines, prefill=()), ask("alone")))
        fleet = made(engines)

        async def meanwhile(reading: asyncio.Task[Any]) -> None:
            await stop(engines, fleet)
            await until(lambda: not engines[1].core.sequences, reading)
            await engines[0].call("resume_requests", None)

        moved = await handed_over(engines, fleet, ask(), meanwhile)
        assert tokens(moved) == alone
        assert fleet.mover.num_moved == {"tokens": 0, "kv": num_kv}
        await until_idle(engines)

    asyncio.run(run())


def test_answer_of_one_token_is_no_failed_move(engines):
    async def run() -> None:
        first = tokens(await answer(made(engines, prefill=()), ask("alone")))[0]
        fleet = made(engines)
        outputs = await handed_over(engines, fleet, ask(stop_token_ids=(first,)))
        assert outputs[-1].finish_reason == "stop"
        assert fleet.mover.num_moved == UNMOVED
        await until_idle(engines)
        assert fleet.mover.num_failed == 0

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_prompts_that_arrive_together_have_the_tokens_of_prompts_alone(ahead):
    """Prompts of one to twelve steps, some with a cached start; an instance has pages for a few."""
    config = replace(CONFIG, max_num_batched_tokens=CHUNK, async_scheduling=ahead, arena_mb=1.2)
    clients = [InProcessClient(build_engine(replace(config, instance=name))) for name in (PREFILL, DECODE)]
    for client in clients:
        client._send = over_a_link(client)
    lengths = [10, 190, 33, 100, 16, 64, 150, 170] * 2
    requests = [
        replace(
            ask(
                f"r{place}", adapter=[None, "upper"][place % 2], temperature=float(place % 3 > 0), seed=place
            ),
            prompt_token_ids=tuple((place // 4 + 3 * token) % 90 + 10 for token in range(length)),
        )
        for place, length in enumerate(lengths)
    ]

    async def run() -> None:
        alone = [tokens(await answer(made(clients, prefill=()), request)) for request in requests]
        fleet = made(clients)
        for number in range(10):
            salted = [replace(one, cache_salt=f"{number // 2}") for one in requests]
            found = await asyncio.gather(*(answer(fleet, request) for request in salted))
            assert [tokens(outputs) for outputs in found] == alone
        assert fleet.mover.num_moved["kv"] > 20
        await until_idle(clients)

    try:
        asyncio.run(run())
    finally:
        for client in clients:
            client.shut_down()
