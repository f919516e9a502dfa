# SPDX-License-Identifier: Apache-2.0
"""Requests that are moved between real engines while they stream."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from anyio import current_time, fail_after

from moe_lora.api import InProcessClient
from moe_lora.config import EngineConfig
from moe_lora.core.errors import EngineDeadError, MoveError, PeerGoneError
from moe_lora.core.request import GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.migration import MOVES_AT_ONCE
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.transport.contract import make_transport
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import KvWindow, Move
from moe_lora.engine.core import EngineCore
from moe_lora.engine.moving import KvTransfer, Outgoing
from moe_lora.engine.text.grammars import regex_grammar
from moe_lora.policies.routing.routers import LeastOutstanding, RoundRobin
from tests.dist.cluster.fleet_parts import fleet_client
from tests.families import ALL_FAMILIES, RECURRENT_FAMILIES
from tests.forked_programs import start_program
from tests.grids import diagonal
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.oracle import greedy_reference
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

DEMO = Path(__file__).parents[3] / "demo"
ADAPTERS = (("upper", str(DEMO / "adapters" / "upper")),)
CONFIG = EngineConfig(
    model_dir=str(DEMO / "model"),
    adapters=ADAPTERS,
    dtype="float32",
    eager=True,
    max_num_seqs=8,
    num_threads=1,
)
PROMPT = tuple(range(20, 57))
LENGTH = 60
AHEAD = 5
"""Tokens that a request may gain while it is moved."""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[InProcessClient]]:
    settings = [replace(CONFIG, instance=str(n), async_scheduling=one) for n, one in enumerate(("off", "on"))]
    clients = [InProcessClient(build_engine(one)) for one in settings]
    yield clients
    for client in clients:
        client.shut_down()


@pytest.fixture
def fleet(engines) -> FleetClient:
    return fleet_client(InstanceRegistry(engines, ADAPTERS), LeastOutstanding())


@contextmanager
def no_file_descriptor() -> Iterator[None]:
    """This process has as many open files as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def ask(name: str = "r", adapter: str | None = "upper", **sampling) -> GenerateRequest:
    params = SamplingParams(
        **{"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0, "logprobs": 1, **sampling}
    )
    return GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=params, adapter=adapter)


def place(fleet: FleetClient, name: str = "r") -> str:
    return fleet._running[name].attempt.instance.name


@dataclass
class Brake:
    """Engines take no step while one of their answers has `limit` tokens, so that a request which is to be
    moved has not ended, however late the test reads it."""

    limit: int

    @contextmanager
    def on(self, fleet: FleetClient) -> Iterator[Brake]:
        with ExitStack() as stack:
            for instance in fleet._instance_registry.instances:
                core = instance.client.core
                stack.enter_context(patch.object(core, "step", partial(self._step, core, core.step)))
            yield self

    def _step(self, core: EngineCore, step: Callable[[], list[TokenOutput]]) -> list[TokenOutput]:
        running = [one for one in core._sequences.values() if not one.held]
        if all(len(one.tokens) - len(PROMPT) < self.limit for one in running):
            return step()
        time.sleep(0.001)
        core.tend()
        core.stalled = False  # else the loop sleeps until a message comes, though the brake is let go before
        return core.catch_up() + core.moves.announce()


async def answer(fleet: FleetClient, request: GenerateRequest, cuts=(), kind="tokens") -> list[TokenOutput]:
    """The request's outputs; it is moved to the other instance each time when it has that many tokens, and
    the move before is over."""
    outputs, num_tokens, left = [], 0, sorted(cuts)
    brake = Brake(left[0] + AHEAD if left else LENGTH)
    with brake.on(fleet) if cuts else nullcontext():
        async for output in fleet.generate(request):
            outputs.append(output)
            num_tokens += len(output.token_ids)
            if not left or num_tokens < left[0]:
                continue
            if fleet._running[request.request_id].next is not None:
                brake.limit = num_tokens + AHEAD  # the move before goes on until more has been read
            else:
                here = place(fleet, request.request_id)
                await fleet.move(request.request_id, str(1 - int(here)), kind)
                del left[0]
                brake.limit = left[0] + AHEAD if left else LENGTH
    return outputs


async def answer_while(fleet: FleetClient, at_ten: Callable[[], Awaitable[None]]) -> list[TokenOutput]:
    """The outputs of a request; `at_ten` is awaited when there are ten tokens, and more to come."""
    outputs = []
    with Brake(10 + AHEAD).on(fleet) as brake:
        async for output in fleet.generate(ask()):
            outputs.append(output)
            if brake.limit < LENGTH and len(tokens(outputs)) >= 10:
                await at_ten()
                brake.limit = LENGTH
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: list[TokenOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs or ()]


def all_idle(engines) -> bool:
    return all(
        not client.core.has_work and not client.core._scheduler.running and not client.core._scheduler.waiting
        for client in engines
    )


async def until_idle(engines) -> None:
    for _ in range(int(PATIENCE_S / 0.01)):
        if all_idle(engines) and not any([(await client.stats()).kv_usage for client in engines]):
            for client in engines:
                client.core.moves.tend()
                assert not client.core.moves._kv._incoming
                assert not client.core.moves._kv._outgoing
            return
        await asyncio.sleep(0.01)
    raise AssertionError("an engine kept a request that had gone")


KINDS = ("tokens", "kv")
CUTS = ({1, 5, 6, 20, 33}, {1, 40}, {7})
SAMPLINGS = (
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "bad_word_ids": ((40,), (50, 51))}
    | {"grammar": regex_grammar("([a-z]|[0-9]{2})+")},
)


@pytest.mark.parametrize(("kind", "cuts", "sampling"), diagonal(KINDS, CUTS, SAMPLINGS))
def test_moved_answer_has_the_tokens_of_one_left_alone(fleet, engines, cuts, sampling, kind):
    """With its KV to the last bit, so that logprobs are equal; by tokens up to rounding."""

    async def run() -> None:
        alone = await answer(fleet, ask("alone", **sampling))
        moved = await answer(fleet, ask("moved", **sampling), cuts, kind)
        assert tokens(moved) == tokens(alone)
        assert len(tokens(moved)) == LENGTH
        exact = logprobs(alone) if kind == "kv" else pytest.approx(logprobs(alone), abs=1e-4)
        assert logprobs(moved) == exact
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 0} | {kind: len(cuts)}
        assert sum(fleet.mover.pause_counts) == len(cuts)
        assert {output.request_id for output in moved} == {"moved"}
        assert moved[-1].finish_reason == "length"
        assert moved[-1].timing is not None
        assert {output.num_cached_tokens for output in moved} == {moved[0].num_cached_tokens}
        stats = await fleet.stats()
        assert [one.outstanding_tokens for one in stats.instances] == [0, 0]
        assert [one.num_resent for one in stats.instances] == [0, 0]
        await until_idle(engines)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("family", [one for one in ALL_FAMILIES if one != "deepseek_v2"])
def test_moved_answers_of_each_family_are_those_of_peft(family, served):  # noqa: F811
    """By tokens and by KV; recurrent layers move by tokens.  DeepSeek-V2 has a close decision here."""
    model, num_tokens = served(family), 12
    adapters = tuple((path.name, str(path)) for path in model.adapters)
    config = replace(CONFIG, model_dir=str(model.model_dir), adapters=adapters)
    engines = [InProcessClient(build_engine(replace(config, instance=str(n)))) for n in range(2)]

    async def run() -> None:
        fleet = fleet_client(InstanceRegistry(engines, adapters), LeastOutstanding())
        for path, kind in itertools.product((None, model.adapters[1]), KINDS):
            asked = ask(f"{path} {kind}", path and path.name, max_tokens=num_tokens)
            found = tuple(tokens(await answer(fleet, asked, {1, 5}, kind)))
            expected = greedy_reference(model.model_dir, path, [PROMPT], num_tokens, [found])
            expected.check_margins()
            assert found == expected.tokens[0], asked.request_id
        num_kv = 0 if family in RECURRENT_FAMILIES else 4
        assert fleet.mover.num_moved == {"tokens": 8 - num_kv, "kv": num_kv}

    try:
        asyncio.run(run())
    finally:
        for client in engines:
            client.shut_down()


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_answer_has_the_experts_of_one_left_alone(fleet, kind):
    def experts(outputs: list[TokenOutput]) -> bytes:
        return b"".join(one.prompt.experts[2] for one in outputs if one.prompt and one.prompt.experts)

    async def run() -> None:
        alone = await answer(fleet, ask("alone", routed_experts=True))
        moved = await answer(fleet, ask("moved", routed_experts=True), {1, 40}, kind)
        num_layers, top_k, _ = alone[0].prompt.experts
        assert len(experts(alone)) == 2 * (len(PROMPT) + LENGTH - 1) * num_layers * top_k
        assert experts(moved) == experts(alone)
        assert fleet.mover.num_moved[kind] == 2

    asyncio.run(run())


@pytest.mark.parametrize("block_size", [16, 8])
def test_kv_that_was_moved_is_used_as_it_is_in_bfloat16(block_size):
    """What the target computes again in bfloat16 has other bits, but it computes one token only."""
    engines = [
        InProcessClient(build_engine(replace(CONFIG, dtype="bfloat16", block_size=size, instance=str(n))))
        for n, size in enumerate([16, block_size])
    ]

    async def run() -> None:
        fleet = fleet_client(InstanceRegistry(engines, ADAPTERS), RoundRobin())
        sampling = {"temperature": 1.0, "seed": 9}
        alone = await answer(fleet, ask("alone", **sampling))
        await tokens_of_base(fleet)
        if block_size != 16:
            with pytest.raises(MoveError, match="move it by tokens"):
                await answer(fleet, ask("moved", **sampling), {9}, "kv")
            return
        rows = sum(client.core.stats().lora_rows_local for client in engines)
        moved = await answer(fleet, ask("moved", **sampling), {1, 9, 20, 40, 50}, "kv")
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 5}
        rows = sum(client.core.stats().lora_rows_local for client in engines) - rows
        assert 0 < rows / 4 <= len(PROMPT) + LENGTH  # in each of 4 layers every token once
        await until_idle(engines)

    async def tokens_of_base(fleet: FleetClient) -> None:
        await answer(fleet, ask("other", None, max_tokens=1))  # the next one begins where the first began

    try:
        asyncio.run(run())
    finally:
        for client in engines:
            client.shut_down()


@pytest.mark.parametrize("kind", [pytest.param("tokens", marks=pytest.mark.slow), "kv"])
def test_requests_are_moved_at_any_moment_while_others_run(fleet, engines, kind):
    """Moves begin while the streams are read: also of requests that wait, or compute their prompt."""

    async def shuffle(rng: random.Random, names: list[str], over: asyncio.Event) -> int:
        num_moved = 0
        while not over.is_set():
            await asyncio.sleep(rng.random() * 0.02)
            name = rng.choice(names)
            if name in fleet._running:
                try:
                    await fleet.move(name, str(1 - int(place(fleet, name))), kind)
                    num_moved += 1
                except (MoveError, AttributeError):
                    continue
        return num_moved

    async def run() -> None:
        requests = [
            ask(f"r{i}", [None, "upper"][i % 2], temperature=float(i % 3 > 0), seed=i) for i in range(6)
        ]
        alone = [tokens(await answer(fleet, request)) for request in requests]
        names, over = [one.request_id for one in requests], asyncio.Event()
        shuffling = asyncio.create_task(shuffle(random.Random(1), names, over))
        for _ in range(20):
            moved = await asyncio.gather(*(answer(fleet, request) for request in requests))
            assert [tokens(outputs) for outputs in moved] == alone
            if fleet.mover.num_moved[kind] > 5:
                break
        over.set()
        assert await shuffling > 5
        assert fleet.mover.num_moved[kind] > 5
        await until_idle(engines)

    asyncio.run(run())


def test_kv_that_is_not_for_the_prefix_cache_is_not_for_it_where_it_is_moved_to(fleet, engines):
    """As what was computed on weights that carried another's adapter."""

    async def run() -> None:
        for shared in (True, False):
            prompt = tuple(range(7 + shared, 7 + shared + 48))
            stream = fleet.generate(replace(ask(), prompt_token_ids=prompt))
            with Brake(AHEAD + len(prompt) - len(PROMPT)).on(fleet):
                await anext(stream)
                here = int(place(fleet))
                for client in engines:
                    for sequence in client.core._sequences.values():
                        sequence.unshared = not shared
                await fleet.move("r", str(1 - here), "kv")
            assert len([output async for output in stream]) > 0
            assert fleet.mover.num_moved["kv"] == 1 + (not shared)
            again = ask("again", max_tokens=1)
            again = replace(again, prompt_token_ids=prompt)
            [output] = [one async for one in engines[1 - here].generate(again)]
            assert (output.num_cached_tokens > 0) == shared

    asyncio.run(run())


def test_abort_reaches_both_ends_of_a_move(fleet, engines):
    async def run() -> None:
        stream = fleet.generate(ask(max_tokens=200))
        await anext(stream)
        moving = asyncio.create_task(fleet.move("r", str(1 - int(place(fleet)))))
        for _ in range(5):
            await asyncio.sleep(0)
        await fleet.abort("r")
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "abort"
        with pytest.raises(MoveError):
            await moving
        await until_idle(engines)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tokens", "kv"])
def test_client_that_leaves_during_a_move_leaves_nothing_behind(fleet, engines, kind):
    async def run() -> None:
        for num_turns in range(0, 60, 3):
            stream = fleet.generate(ask(max_tokens=200))
            await anext(stream)
            moving = asyncio.create_task(fleet.move("r", str(1 - int(place(fleet))), kind))
            for _ in range(num_turns):
                await asyncio.sleep(0.0005)
            await stream.aclose()
            await asyncio.gather(moving, return_exceptions=True)
            await until_idle(engines)
        stats = await fleet.stats()
        assert [one.outstanding_tokens for one in stats.instances] == [0, 0]

    asyncio.run(run())


@pytest.mark.parametrize(("method", "after"), diagonal(("hold_request", "resume_request"), (False, True)))
def test_source_goes_on_where_the_target_does_not_take_over(fleet, engines, monkeypatch, method, after):
    async def run() -> None:
        alone = tokens(await answer(fleet, ask("alone")))
        num_failed, limits = 0, []

        @contextmanager
        def limited(limit_s: float) -> Iterator[None]:
            with fail_after(PATIENCE_S) as scope:
                limits.append(scope)
                yield

        def silent(client: InProcessClient):
            call_really = client.call

            async def ask_and_hear_nothing(name: str, *args):
                nonlocal num_failed
                if name != method or (args[:1] == ("r",) and name == "resume_request"):
                    return await call_really(name, *args)
                num_failed += 1
                if after:
                    await call_really(name, *args)
                limits[-1].deadline = current_time()  # the call's time is over now
                return await asyncio.get_running_loop().create_future()

            return ask_and_hear_nothing

        async def move() -> None:
            for client in engines:
                monkeypatch.setattr(client, "call", silent(client))
            monkeypatch.setattr("moe_lora.dist.cluster.migration.fail_after", limited)
            with pytest.raises(MoveError, match="it took too long"):
                await fleet.move("r", str(1 - int(place(fleet))))
            monkeypatch.undo()

        outputs = await answer_while(fleet, move)
        assert num_failed == 1
        assert tokens(outputs) == alone
        assert fleet.mover.num_moved["tokens"] == 0
        assert fleet.mover.num_failed == 1
        await until_idle(engines)

    asyncio.run(run())


def test_move_to_nowhere_is_refused_and_says_where_to(fleet):
    async def run() -> None:
        stream = fleet.generate(ask())
        await anext(stream)
        here = place(fleet)
        for target in (here, "nobody"):
            with pytest.raises(
                MoveError, match=f"can't be moved to '{target}'; choose one of {1 - int(here)}"
            ):
                await fleet.move("r", target)
        with pytest.raises(MoveError, match="'other' is not running"):
            await fleet.move("other", "1")
        await stream.aclose()

    asyncio.run(run())


def test_other_version_at_the_target_is_no_target(fleet, engines):
    async def run() -> None:
        stream = fleet.generate(ask())
        outputs = [await anext(stream)]
        target = engines[1 - int(place(fleet))]
        await target.call("load_adapter", "upper", ADAPTERS[0][1], replace=True, version=7)
        with pytest.raises(MoveError, match=r"begun with version 1 .* version 7 is served here"):
            await fleet.move("r", str(engines.index(target)))
        outputs += [output async for output in stream]
        assert len(tokens(outputs)) == LENGTH
        await target.call("load_adapter", "upper", ADAPTERS[0][1], replace=True, version=1)

    asyncio.run(run())


@pytest.mark.parametrize("dies", ["source", "target"])
def test_end_that_dies_at_the_hand_over_leaves_the_request_with_the_other(fleet, engines, monkeypatch, dies):
    async def die(client: InProcessClient, call_really: Callable[..., Any], name: str, *args: Any) -> Any:
        if name in ("hold_request", "resume_request"):
            raise EngineDeadError("it has ended")
        return await call_really(name, *args)

    async def run() -> None:
        alone = tokens(await answer(fleet, ask("alone")))

        async def move() -> None:
            here = int(place(fleet))
            client = engines[here if dies == "source" else 1 - here]
            monkeypatch.setattr(client, "call", partial(die, client, client.call))
            with pytest.raises(MoveError, match="it has ended"):
                await fleet.move("r", str(1 - here))
            monkeypatch.undo()

        outputs = await answer_while(fleet, move)
        assert tokens(outputs) == alone
        await until_idle(engines)

    asyncio.run(run())


def test_request_whose_window_was_lost_can_be_moved_later(fleet, engines, monkeypatch):
    """The target's window is gone when the source puts the last block; the next move is by tokens."""
    put_really, gone = KvTransfer._put, []

    def put(self: KvTransfer, outgoing: Outgoing, *args: Any) -> None:
        if outgoing.window in gone:
            raise PeerGoneError("the window was freed")
        put_really(self, outgoing, *args)
        gone.append(outgoing.window)

    async def run() -> None:
        alone = tokens(await answer(fleet, ask("alone")))

        async def move() -> None:
            target = str(1 - int(place(fleet)))
            monkeypatch.setattr(KvTransfer, "_put", put)
            with pytest.raises(MoveError, match="the window was freed"):
                await fleet.move("r", target, "kv")
            await fleet.move("r", target, "tokens")

        outputs = await answer_while(fleet, move)
        assert tokens(outputs) == alone
        assert fleet.mover.num_moved == {"tokens": 1, "kv": 0}
        await until_idle(engines)

    asyncio.run(run())


def test_target_that_can_not_make_a_window_computes_the_kv(fleet, engines, caplog):
    """No file descriptor is free at the target: the move is by tokens, and both engines go on."""

    async def run() -> None:
        alone = tokens(await answer(fleet, ask("alone")))

        async def move() -> None:
            with no_file_descriptor():
                await fleet.move("r", str(1 - int(place(fleet))), "kv")

        outputs = await answer_while(fleet, move)
        assert tokens(outputs) == alone
        assert fleet.mover.num_moved == {"tokens": 1, "kv": 0}
        assert "Too many open files; it is computed here instead" in caplog.text
        await until_idle(engines)
        assert tokens(await answer(fleet, ask("later"), {20}, "kv")) == alone
        assert fleet.mover.num_moved == {"tokens": 1, "kv": 1}

    asyncio.run(run())


def test_kv_goes_over_gloo_too(fleet, engines, monkeypatch):
    """As between hosts: puts that are sent, and rows that the other end's receiver places."""
    for number, client in enumerate(engines):
        kv = client.core.moves._kv
        monkeypatch.setattr(kv, "_made", make_transport("gloo", name=f"engine-{number}"))

    async def run() -> None:
        alone = await answer(fleet, ask("alone"))
        moved = await answer(fleet, ask("moved"), {3, 20, 41}, "kv")
        assert tokens(moved) == tokens(alone)
        assert logprobs(moved) == logprobs(alone)
        assert fleet.mover.num_moved == {"tokens": 0, "kv": 3}
        await until_idle(engines)

    try:
        asyncio.run(run())
    finally:
        for client in engines:
            client.core.moves._kv._made.close()


WINDOW_OWNER = """
import sys
from moe_lora.dist.transport.contract import make_transport
with make_transport("gloo", name="target") as transport:
    windows = [transport.alloc(f"kv-{number}", int(sys.argv[1]), 1) for number in range(2)]
    for window in windows:
        print(window.descriptor().decode(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def window_owner(page_bytes: int) -> Iterator[tuple[list[bytes], subprocess.Popen[bytes]]]:
    """A process that has two windows, of 16 pages each."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = start_program(WINDOW_OWNER, str(16 * page_bytes), **pipes)
    try:
        yield [process.stdout.readline().strip() for _ in range(2)], process
    finally:
        process.send_signal(signal.SIGCONT)
        process.communicate()


def test_steps_go_on_while_kv_is_put_to_a_target_that_stands_still():
    """Over gloo, whose puts wait for the target's process: when the rest is sent, and when a window is let go
    of whose request has ended."""
    client = InProcessClient(build_engine(CONFIG))
    kv = client.core.moves._kv
    kv._open_transport = lambda: make_transport("gloo", name="source", timeout_s=120.0)
    step = client.core.step

    def paced_step() -> list[Any]:
        time.sleep(0.02)  # no request ends before it is held
        return step()

    client.core.step = paced_step  # type: ignore[method-assign]

    async def run(descriptors: list[bytes], target: subprocess.Popen[bytes]) -> None:
        layout = repr(kv._layout)
        moved, left = (client.generate(ask(name, max_tokens=200)) for name in ("moved", "left"))
        for stream, name, descriptor in zip((moved, left), ("moved", "left"), descriptors, strict=True):
            await anext(stream)
            sent = await client.call("kv_send", name, KvWindow(descriptor, layout))
            assert sent.num_tokens >= 32
        await client.call("hold_request", "moved", 0)
        stop(target.pid)
        rest = asyncio.create_task(client.call("kv_send", "moved", KvWindow(descriptors[0], layout)))
        num_steps = client.core.stats().num_steps
        await anext(left)
        await left.aclose()
        beside = [output async for output in client.generate(ask("beside"))]
        assert len(tokens(beside)) == LENGTH
        assert "left" not in client.core._sequences
        assert client.core.stats().num_steps >= num_steps + LENGTH
        assert not rest.done(), "the put is outstanding"
        target.send_signal(signal.SIGCONT)
        assert (await rest).num_tokens > 32
        await moved.aclose()

    try:
        with window_owner(kv.page_bytes) as (descriptors, target):
            asyncio.run(run(descriptors, target))
    finally:
        client.shut_down()


def test_both_ends_of_an_engine_share_one_transport(engines):
    """Its own thread makes windows while the one for files puts blocks: both may be the first to need it."""
    made, both = [], threading.Barrier(2)

    def open_transport() -> Any:
        time.sleep(0.05)
        made.append(make_transport("shm", name="once"))
        return made[-1]

    layout = engines[0].core.moves._kv._layout
    kv = KvTransfer(torch.zeros(layout.page_bytes, dtype=torch.uint8), layout, open_transport)

    def use() -> Any:
        both.wait()
        return kv._transport

    with ThreadPoolExecutor(2) as threads:
        found = [one.result() for one in [threads.submit(use) for _ in range(2)]]
    kv.close()
    assert found == made * 2


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_kv_without_memory_for_a_window_is_computed(error):
    transport = Mock(alloc=Mock(side_effect=error("no memory")))
    layout = SimpleNamespace(page_bytes=64, block_size=4)
    kv = KvTransfer(torch.zeros(64, dtype=torch.uint8), layout, lambda: transport)
    request = SimpleNamespace(request_id="a")
    kv.expect(SimpleNamespace(limit_tokens=10, tokens=[1], request=request, table=None))
    assert kv.window("a") is None
    kv.close()


def test_windows_are_let_go_beside_a_thread_that_puts(engines):
    """It takes its request's window out while the engine's thread looks for those whose request has ended."""
    layout = engines[0].core.moves._kv._layout
    kv = KvTransfer(torch.zeros(layout.page_bytes, dtype=torch.uint8), layout, None)
    kv._outgoing = {name: Outgoing(b"", None, None) for name in ("runs", "puts")}

    class Running:
        def __contains__(self, request_id: object) -> bool:
            kv._outgoing.pop("puts", None)
            return True

    kv.drop_all_but(Running())
    assert list(kv._outgoing) == ["runs"]
    kv.close()


def test_order_that_waited_while_the_request_was_moved_is_dropped(fleet, engines):
    """A plan is of requests where they were: carried out late it would send one back."""

    async def run() -> None:
        for _ in range(MOVES_AT_ONCE):
            await fleet.mover._places.acquire()
        outputs, num_moves = [], 0
        with Brake(10).on(fleet) as brake:
            async for output in fleet.generate(ask()):
                outputs.append(output)
                resumable = fleet._running["r"]
                paused = sum(fleet.mover.pause_counts)
                if len(outputs) < 5 or resumable.next is not None or paused < num_moves:
                    continue
                here = int(place(fleet))
                if num_moves == 0:
                    order = Move(resumable.attempt.request.request_id, str(1 - here), "tokens")
                    fleet.mover.follow(order)
                    await asyncio.sleep(0)
                if num_moves < 2:
                    await fleet.move("r", str(1 - here))
                    num_moves += 1
                    brake.limit += 10
                elif fleet.mover._places.locked():
                    for _ in range(MOVES_AT_ONCE):
                        fleet.mover._places.release()
                    brake.limit = LENGTH
        assert len(tokens(outputs)) == LENGTH
        assert fleet.mover.num_moved == {"tokens": 2, "kv": 0}
        assert not fleet.mover._tasks
        await until_idle(engines)

    asyncio.run(run())
