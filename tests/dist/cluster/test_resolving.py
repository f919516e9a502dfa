# SPDX-License-Identifier: Apache-2.0
"""A front end that loads unknown adapters: unloads, and requests that wait for a load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.core.errors import AdapterNotFoundError, AdapterVersionError, BusyError
from moe_lora.core.request import GenerateRequest, ModelInfo, SamplingParams, TokenOutput
from moe_lora.dist.cluster import resolving
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry, Served, ServedVersion
from moe_lora.dist.cluster.resolving import MARK, MissingNames, Resolver, ResolvingClient
from moe_lora.engine.client.messages import PauseScope
from moe_lora.policies.routing.routing import RoundRobin
from tests.virtual_clock import VirtualClock

from .fleet_parts import CountingEngine

MOST = 5


class FrontEnd:
    """A resolving front end of one engine, with the controller in its process.

    Finds every name in /names.  found: the searches so far.  may_find: a search ends once set.
    """

    def __init__(
        self,
        engine: CountingEngine,
        served: Served | None = None,
        registry: InstanceRegistry | None = None,
        adapters: FleetAdapters | None = None,
    ) -> None:
        self.found: list[str] = []
        self.may_find = asyncio.Event()
        self.may_find.set()
        self.registry = registry or InstanceRegistry([engine])
        self.registry.recover(served or Served())
        self.adapters = adapters = adapters or FleetAdapters(self.registry)
        routes = Routes(config=FrontEndConfig(), router=RoundRobin(), meter=None, ranks={})
        self.client = ResolvingClient(self.registry, routes, VirtualClock(), adapters.call)

        self.load: Callable[..., Any] = adapters.call

        def load(name: str, folder: str) -> Any:
            return self.load("load_adapter", name, folder + MARK, most=MOST)

        self.client.attach(Resolver(self._find, load, MissingNames(60.0)), MOST)

    async def _find(self, name: str) -> str:
        self.found.append(name)
        await self.may_find.wait()
        return f"/names/{name}"

    async def ask(self, name: str, request_id: str | None = None) -> list[TokenOutput]:
        """The outputs of a request.  request_id: None: the name."""
        return [output async for output in self.client.generate(request(name, 1, request_id))]

    def names(self) -> set[str]:
        return set(self.registry.adapters)


def request(name: str, max_tokens: int, request_id: str | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(
        request_id=request_id or name, prompt_token_ids=(1,), sampling=sampling, adapter=name
    )


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_only_adapters_of_a_resolver_are_unloaded_also_after_a_restart() -> None:
    own = {"other": "/names/x", "team/a": "/names/team/a", "put": "/tmp/received/1", "hub": "/names/hub"}

    async def run() -> None:
        engine = CountingEngine()
        first = FrontEnd(engine)
        for name, path in own.items():
            await first.client.call("load_adapter", name, path)
        for number in range(20):
            assert len(await first.ask(f"a{number}")) == 1
            assert first.names() >= own.keys()
            assert len(first.names() - own.keys()) <= MOST
        infos = await engine.list_adapters()
        have = {one.name: ServedVersion(str(one.path), one.version) for one in infos}
        again = FrontEnd(engine, Served.of(have))
        for number in range(20, 40):
            await again.ask(f"a{number}")
            assert again.names() >= own.keys()
            assert len(again.names() - own.keys()) <= MOST
        assert again.names() == set(engine.adapters)

    asyncio.run(run())


def test_a_load_in_place_and_a_pin_keep_a_resolved_adapter() -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        for name in ("published", "pinned"):
            await front_end.ask(name)
        await front_end.client.call("load_adapter", "published", "/store/2", replace=True)
        await front_end.client.call("pin_adapter", "pinned", True)
        for number in range(20):
            await front_end.ask(f"a{number}")
        assert front_end.names() >= {"published", "pinned"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("verb", "args"), [("load_adapter", ("a", "/store/2", True)), ("pin_adapter", ("a", True))]
)
def test_an_unload_of_a_version_spares_what_came_after(verb: str, args: tuple[Any, ...]) -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        await front_end.ask("a")
        seen = front_end.registry.served_version("a")
        await front_end.client.call(verb, *args)
        with pytest.raises(AdapterNotFoundError, match="meanwhile"):
            await front_end.client.call("unload_adapter", "a", seen)
        assert front_end.names() == {"a"}
        await front_end.client.call("unload_adapter", "a", front_end.registry.served_version("a"))
        assert front_end.names() == set()

    asyncio.run(run())


def test_a_request_that_comes_during_a_sweep_keeps_its_adapter() -> None:
    async def run() -> None:
        engine = CountingEngine()
        front_end = FrontEnd(engine)
        for number in range(MOST - 1):
            await front_end.ask(f"a{number}")
        unload, going, go_on = engine._unload_adapter, asyncio.Event(), asyncio.Event()

        async def slow(name: str, waits: bool = True) -> None:
            assert not waits
            going.set()
            await go_on.wait()
            await unload(name, waits)

        engine._unload_adapter = slow  # type: ignore[method-assign]
        front_end.client._most = 2  # a sweep has three adapters to unload
        cold = asyncio.create_task(front_end.ask("cold"))
        await going.wait()
        first = next(name for name in engine.adapters if name not in front_end.names())
        second = next(name for name in engine.adapters if name in front_end.names())
        answer = front_end.client.generate(request(second, 40))
        await anext(answer)
        go_on.set()
        await cold
        await until(lambda: front_end.client._unloading is None)
        assert second in front_end.names()
        assert first not in front_end.names()
        assert len([output async for output in answer]) == 39

    asyncio.run(run())


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_aborted_request_ends_during_its_load_and_reaches_no_instance(is_gone: bool) -> None:
    async def run() -> None:
        engine = CountingEngine()
        front_end = FrontEnd(engine)
        front_end.may_find.clear()
        waiting = asyncio.create_task(front_end.ask("a"))
        other = asyncio.create_task(front_end.ask("a", "other"))
        await until(lambda: front_end.found)
        if is_gone:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            await front_end.client.abort("a")
            [output] = await waiting
            assert (output.request_id, output.finish_reason, output.token_ids) == ("a", "abort", ())
        assert not other.done()
        front_end.may_find.set()
        assert len(await other) == 1
        assert [one.request_id for one in engine.requests] == ["other"]
        assert front_end.found == ["a"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("verb", "args"),
    [("abort_requests", ()), ("pause_requests", ("abort", 9.0)), ("pause_requests", ("wait", 9.0))],
)
def test_an_abort_of_a_tenant_ends_its_requests_that_wait_for_a_load(
    verb: str, args: tuple[Any, ...]
) -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        front_end.may_find.clear()
        ours = asyncio.create_task(front_end.ask("a"))
        other = asyncio.create_task(front_end.ask("b"))
        await until(lambda: len(front_end.found) == 2)
        await front_end.client.call(verb, PauseScope("key", "", ("a*",)), *args)
        if args[:1] != ("wait",):
            assert [one.finish_reason for one in await ours] == ["abort"]
        assert not other.done()
        front_end.may_find.set()
        assert len(await other) == 1
        await ours

    asyncio.run(run())


def test_two_front_ends_that_load_at_once_never_pass_the_number() -> None:
    async def run() -> None:
        engine = CountingEngine()
        first = FrontEnd(engine)
        second = FrontEnd(engine, registry=first.registry, adapters=first.adapters)
        most = 0
        load = engine._load_adapter

        async def slow(*args: Any, **words: Any) -> Any:
            nonlocal most
            info = await load(*args, **words)
            most = max(most, len(engine.adapters))
            await asyncio.sleep(0.01)
            return info

        engine._load_adapter = slow  # type: ignore[method-assign]
        one = (first.ask(f"a{number}") for number in range(12))
        two = (second.ask(f"a{number}") for number in range(8, 20))
        assert {len(outputs) for outputs in await asyncio.gather(*one, *two)} == {1}
        assert most == MOST

    asyncio.run(run())


def test_a_request_waits_for_room_and_then_says_that_there_is_none(monkeypatch) -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        answers = [front_end.client.generate(request(f"a{number}", 4)) for number in range(MOST)]
        for answer in answers:
            await anext(answer)
        waiting = asyncio.create_task(front_end.ask("b"))
        await until(lambda: any(one.adapter == "b" for one, _ in front_end.client._loads.values()))
        assert "b" not in front_end.found, "nothing is looked up without room"
        assert len([output async for output in answers[0]]) == 3
        assert len(await waiting) == 1
        assert len(front_end.names()) <= MOST
        again = front_end.client.generate(request("c", 4))
        await anext(again)
        monkeypatch.setattr(resolving, "ROOM_S", 0.0)
        with pytest.raises(BusyError, match="max_resolved=5"):
            await front_end.ask("d")

    asyncio.run(run())


def test_an_abort_during_an_answer_ends_it() -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        answer = front_end.client.generate(request("a", 40))
        await anext(answer)
        await front_end.client.abort("a")
        assert [output.finish_reason for output in [one async for one in answer]][-1] == "abort"

    asyncio.run(run())


def test_a_sweep_spares_an_adapter_between_its_load_and_its_request() -> None:
    async def run() -> None:
        front_end = FrontEnd(CountingEngine())
        first = front_end.client.model_info
        at_info, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> ModelInfo:
            at_info.set()
            await go_on.wait()
            return await first()

        front_end.client.model_info = slow  # type: ignore[method-assign]
        asked = asyncio.create_task(front_end.ask("a"))
        await at_info.wait()
        front_end.client._most = 0
        await front_end.client._unload_idle()
        assert front_end.names() == {"a"}
        go_on.set()
        assert len(await asked) == 1
        await front_end.client._unload_idle()
        assert front_end.names() == set()

    asyncio.run(run())


@pytest.mark.parametrize("num_unloads", [1, 1000])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_request_whose_adapter_others_unload_loads_it_again_and_is_no_404(
    num_unloads: int, is_known: bool
) -> None:
    """is_known: the front end knows of the unload at the instance's refusal."""

    async def run() -> None:
        engine = CountingEngine()
        front_end = FrontEnd(engine)
        left = iter(range(num_unloads))
        generate, load = engine.generate, front_end.client.call

        def unloaded(asked: GenerateRequest) -> Any:
            if next(left, None) is not None:
                engine.adapters.pop("a")
                if is_known:
                    front_end.registry.forget("a")
            return generate(asked)

        async def loaded(*args: Any, **words: Any) -> Any:
            if not is_known:
                front_end.registry.forget("a")  # of the controller's process
            return await load(*args, **words)

        engine.generate = unloaded  # type: ignore[method-assign]
        front_end.load = loaded
        if num_unloads == 1:
            assert len(await front_end.ask("a")) == 1
            assert front_end.found == ["a", "a"]
            return
        with pytest.raises(AdapterVersionError, match=r"raise sources\.max_resolved"):
            await front_end.ask("a")
        assert not front_end.client._used

    asyncio.run(run())
