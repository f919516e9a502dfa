# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from msgspec import structs

from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFailedError,
    AdapterNotFoundError,
    AdapterVersionError,
    BusyError,
    CapacityError,
    EngineDeadError,
    EngineSilentError,
    MoveError,
)
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, SamplingParams, TokenOutput
from moe_lora.dist.cluster import adapter_calls
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.resumable_request import MAX_RESENDS
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.policies.routing.demand import DemandMeter
from moe_lora.policies.routing.routing import LeastOutstanding, RequestListener, RoundRobin
from tests.patience import PATIENCE_S

from .fleet_parts import CountingEngine, fleet_client


def fleet_of(*engines: CountingEngine, router=None) -> FleetClient:
    adapters = tuple(engines[0].adapters.items())
    return fleet_client(InstanceRegistry(engines, adapters), router or LeastOutstanding())


def ask(name: str = "r", adapter: str | None = None, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
    return GenerateRequest(request_id=name, prompt_token_ids=(0, 1), sampling=sampling, adapter=adapter)


async def tokens_of(fleet: FleetClient, request: GenerateRequest) -> list[int]:
    return [token async for output in fleet.generate(request) for token in output.token_ids]


def test_answer_goes_on_at_another_instance_without_gap_or_repetition():
    dying, other = CountingEngine(dies_at=5), CountingEngine()
    fleet = fleet_of(dying, other)
    assert asyncio.run(tokens_of(fleet, ask())) == list(range(2, 10))
    assert (other.requests[0].prompt_token_ids, other.requests[0].generated) == ((0, 1), (2, 3, 4))
    stats = asyncio.run(fleet.stats())
    seen = [(one.live, one.num_resent, one.outstanding_tokens) for one in stats.instances]
    assert seen == [(False, 1, 0), (True, 0, 0)]


def test_answers_survive_one_instance_after_the_other():
    engines = [CountingEngine(dies_at=place) for place in (3, 5, 7)]
    assert asyncio.run(tokens_of(fleet_of(*engines, CountingEngine()), ask())) == list(range(2, 10))


def test_every_one_of_many_requests_is_answered():
    async def many() -> list[list[int]]:
        fleet = fleet_of(CountingEngine(dies_at=6), CountingEngine(), router=RoundRobin())
        return await asyncio.gather(*(tokens_of(fleet, ask(f"r{i}")) for i in range(20)))

    assert asyncio.run(many()) == [list(range(2, 10))] * 20


def test_last_instance_to_end_fails_its_requests_and_says_so():
    fleet = fleet_of(CountingEngine(dies_at=5), CountingEngine(dies_at=6))
    with pytest.raises(EngineDeadError, match=r"computed this request ended; no LLM instance is running"):
        asyncio.run(tokens_of(fleet, ask()))
    assert not asyncio.run(fleet.is_alive())
    with pytest.raises(EngineDeadError, match=r"^no LLM instance is running: none has dialled in"):
        asyncio.run(tokens_of(fleet, ask()))


def test_request_that_ends_every_engine_is_given_up():
    engines = [CountingEngine(dies_at=5) for _ in range(MAX_RESENDS + 2)]
    fleet = fleet_of(*engines)
    with pytest.raises(EngineDeadError, match="not tried again"):
        asyncio.run(tokens_of(fleet, ask()))
    assert asyncio.run(fleet.is_alive())


@pytest.mark.parametrize(("change", "reason"), [("load", "replaced"), ("unload", "unloaded")])
def test_answer_is_not_finished_on_another_version(change, reason):
    async def run() -> None:
        fleet = fleet_of(CountingEngine(adapters={"a": "p"}), CountingEngine(adapters={"a": "p"}))
        stream = fleet.generate(ask(adapter="a"))
        await anext(stream)
        if change == "load":
            await fleet.call("load_adapter", "a", "q", replace=True)
        else:
            await fleet.call("unload_adapter", "a")
        fleet._instance_registry.instances[0].client.alive = False
        with pytest.raises(EngineDeadError, match=f"adapter 'a' was {reason} meanwhile"):
            await anext(stream)

    asyncio.run(run())


class StoppedEngine(CountingEngine):
    """It says one token, and no more whatever it is told."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        self.left = asyncio.Event()
        yield TokenOutput(request_id=request.request_id, token_ids=(2,))
        await self.left.wait()
        yield TokenOutput(request_id=request.request_id, token_ids=(), finish_reason="abort")

    def leave(self, request_id: str) -> None:
        self.left.set()


def test_aborted_request_ends_though_its_instance_does_not_answer():
    async def run() -> list[str | None]:
        fleet, reasons = fleet_of(StoppedEngine()), []
        async for output in fleet.generate(ask()):
            reasons.append(output.finish_reason)
            await fleet.abort("r")
        return reasons

    with patch("moe_lora.dist.cluster.routing_client.ABORT_S", 0.05):
        assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == [None, "abort"]


class NumberedEngine(CountingEngine):
    """One that has a version of its adapters."""

    version = 1

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if request.adapter_version not in (None, self.version):
            raise AdapterVersionError(f"version {self.version} is served here")
        async for output in super().generate(request):
            yield structs.replace(output, adapter_version=self.version)


@pytest.mark.parametrize("begun", [1, 2])
def test_answer_is_not_finished_on_another_version_while_only_some_instances_have_it(begun):
    """Version 1 is served, and version 2 is being loaded."""
    one, other, third = (NumberedEngine(adapters={"a": "p"}) for _ in range(3))
    one.version, other.version, third.version = begun, 3 - begun, begun
    one.dies_at = 5
    fleet = fleet_of(one, other, router=RoundRobin())
    with pytest.raises(AdapterVersionError, match=f"version {3 - begun} is served here"):
        asyncio.run(tokens_of(fleet, ask(adapter="a")))
    assert len(fleet._instance_registry.live) == 1
    one.alive = True
    fleet = fleet_of(one, third, router=RoundRobin())
    assert asyncio.run(tokens_of(fleet, ask(adapter="a"))) == list(range(2, 10))


def test_request_that_had_not_begun_takes_the_new_version():
    async def run() -> list[int]:
        dying = CountingEngine(adapters={"a": "p"}, dies_at=2)
        fleet = fleet_of(dying, CountingEngine(adapters={"a": "p"}))
        stream = asyncio.create_task(tokens_of(fleet, ask(adapter="a")))
        await fleet.call("load_adapter", "a", "q", replace=True)
        return await stream

    assert asyncio.run(run()) == list(range(2, 10))


def test_shortest_queue_counts_what_answers_may_still_need():
    async def run() -> tuple[list[int], list[int]]:
        engines = CountingEngine(), CountingEngine()
        fleet = fleet_of(*engines)
        long, short = fleet.generate(ask("long", max_tokens=30)), fleet.generate(ask("short", max_tokens=2))
        await anext(long)
        await anext(short)
        left = [one.outstanding_tokens for one in (await fleet.stats()).instances]
        await tokens_of(fleet, ask("next"))
        await long.aclose()
        await short.aclose()
        assert [one.outstanding_tokens for one in (await fleet.stats()).instances] == [0, 0]
        return left, [len(engine.requests) for engine in engines]

    assert asyncio.run(run()) == ([29, 1], [1, 2])


def test_leaving_a_stream_leaves_its_engine():
    async def run() -> set[str]:
        engine = CountingEngine()
        stream = fleet_of(engine).generate(ask())
        await anext(stream)
        await stream.aclose()
        return engine.running

    assert asyncio.run(run()) == set()


def test_abort_reaches_the_instance_that_has_the_request_now():
    async def run() -> str | None:
        fleet = fleet_of(CountingEngine(dies_at=4), CountingEngine())
        stream = fleet.generate(ask())
        outputs = [await anext(stream) for _ in range(4)]
        await fleet.abort("r")
        outputs += [output async for output in stream]
        return outputs[-1].finish_reason

    assert asyncio.run(run()) == "abort"


def test_aborted_request_whose_engine_ends_is_not_sent_again():
    async def run() -> tuple[str | None, list]:
        other = CountingEngine()
        fleet = fleet_of(dying := CountingEngine(), other)
        stream = fleet.generate(ask())
        await anext(stream)
        dying.alive = False
        await fleet.abort("r")
        return [output async for output in stream][-1].finish_reason, other.requests

    assert asyncio.run(run()) == ("abort", [])


def test_second_request_of_the_same_id_is_refused():
    async def run() -> None:
        fleet = fleet_of(CountingEngine(), CountingEngine())
        stream = fleet.generate(ask())
        await anext(stream)
        with pytest.raises(ValueError, match="already running"):
            await anext(fleet.generate(ask()))

    asyncio.run(run())


def test_adapters_are_loaded_and_unloaded_everywhere():
    async def run() -> None:
        engines = CountingEngine(), CountingEngine()
        fleet = fleet_of(*engines)
        await fleet.call("load_adapter", "a", "p")
        with pytest.raises(AdapterExistsError, match="already loaded"):
            await fleet.call("load_adapter", "a", "q")
        assert [engine.adapters for engine in engines] == [{"a": "p"}] * 2
        await fleet.call("load_adapter", "a", "q", replace=True)
        [info] = await fleet.list_adapters()
        assert (info.name, info.version, info.path) == ("a", 2, "q")
        assert [engine.versions for engine in engines] == [{"a": 2}] * 2
        engines[1].refuse = frozenset({"r"})
        with pytest.raises(AdapterError, match="the others took it back"):
            await fleet.call("load_adapter", "a", "r", replace=True)
        assert [engine.versions for engine in engines] == [{"a": 2}] * 2
        await fleet.call("unload_adapter", "a")
        assert [engine.adapters for engine in engines] == [{}, {}]
        with pytest.raises(AdapterNotFoundError):
            await fleet.call("unload_adapter", "a")

    asyncio.run(run())


def test_names_and_versions_are_known_without_an_answer_of_an_instance(monkeypatch):
    engine = CountingEngine(adapters={"a": "p", "b": "q"})
    fleet = fleet_of(engine)
    infos = {one.name: one for one in asyncio.run(engine.list_adapters())}
    monkeypatch.setattr(engine, "list_adapters", AsyncMock(return_value=list(infos.values())))
    assert {name: (one.path, one.version) for name, one in fleet.adapters.items()} == {
        "a": ("p", 1),
        "b": ("q", 1),
    }
    engine.list_adapters.assert_not_called()
    fleet._instance_registry.serve(replace(infos["b"], version=2), "q")
    a, b = asyncio.run(fleet.list_adapters())
    assert a is infos["a"], "an entry with the served version is no copy"
    assert (b.name, b.version) == ("b", 2)
    fleet._instance_registry.lose(fleet.instances[0], engine)
    with pytest.raises(EngineDeadError, match="no LLM instance is running"):
        assert fleet.adapters


def test_adapters_are_pinned_everywhere_or_nowhere():
    first, second = (CountingEngine(adapters={"a": "x", "b": "y"}) for _ in range(2))
    second.refuse = frozenset({"b"})
    fleet = fleet_of(first, second)
    asyncio.run(fleet.call("pin_adapter", "a", pinned=True))
    assert first.calls == second.calls == [("pin", "a")]
    with pytest.raises(CapacityError, match="'b' can't be pinned"):
        asyncio.run(fleet.call("pin_adapter", "b", pinned=True))
    assert first.calls[1:] == [("pin", "b"), ("unpin", "b")]
    served = fleet._instance_registry.adapters
    assert (served["a"].pinned, served["b"].pinned) == (True, False)
    with pytest.raises(AdapterNotFoundError, match="'c' is not loaded"):
        asyncio.run(fleet.call("pin_adapter", "c", pinned=True))


def test_a_load_that_one_instance_can_not_serve_yet_may_be_sent_again(monkeypatch):
    busy = CountingEngine()
    monkeypatch.setattr(busy, "_load_adapter", AsyncMock(side_effect=BusyError("a slot is held")))
    fleet = fleet_of(CountingEngine(), busy)
    with pytest.raises(BusyError, match=r"took it back: a slot is held"):
        asyncio.run(fleet.call("load_adapter", "a", "p"))


def test_a_pinned_adapter_is_loaded_nowhere_while_one_instance_is_busy(monkeypatch):
    async def run() -> None:
        first, second = (CountingEngine(adapters={"a": "p"}) for _ in range(2))
        fleet = fleet_of(first, second)
        await fleet.call("pin_adapter", "a", pinned=True)
        with monkeypatch.context() as busy:
            busy.setattr(second, "_check_next", AsyncMock(side_effect=BusyError("a slot is held")))
            with pytest.raises(BusyError, match=r"^a slot is held"):
                await fleet.call("load_adapter", "a", "q", replace=True)
        assert first.adapters == second.adapters == {"a": "p"}
        assert (await fleet.call("load_adapter", "a", "q", replace=True)).version == 2, "no number is lost"

    asyncio.run(run())


def test_a_load_is_taken_back_once_requests_of_the_refused_version_have_ended(monkeypatch):
    monkeypatch.setattr(adapter_calls, "UNDO_PAUSE_S", 0.0)

    async def run() -> None:
        held = CountingEngine(adapters={"a": "p"})
        picky = CountingEngine(adapters={"a": "p"}, refuse=frozenset({"bad"}))
        fleet, load, answers = fleet_of(held, picky), held._load_adapter, [BusyError("a slot is held")] * 3

        async def loaded(name: str, path: str, *words: Any, **more: Any) -> AdapterInfo:
            if path == "p" and answers:
                await tokens_of(fleet, ask(adapter="a"))
                raise answers.pop()
            return await load(name, path, *words, **more)

        monkeypatch.setattr(held, "_load_adapter", loaded)
        with pytest.raises(AdapterError, match="the others took it back"):
            await fleet.call("load_adapter", "a", "bad", replace=True)
        while held.adapters != {"a": "p"} or fleet.instances[0].missing:
            await asyncio.sleep(0)
        assert held.adapters == picky.adapters == {"a": "p"}
        assert len(picky.requests) >= 2, "the busy instance gets none"
        assert [one.missing for one in fleet.instances] == [set(), set()]
        num_before = len(held.requests)
        for _ in range(2):
            await tokens_of(fleet, ask(adapter="a"))
        assert len(held.requests) > num_before

    asyncio.run(run())


@pytest.mark.parametrize("end", ["unload", "load", "gone", "closed"])
def test_a_load_answers_while_a_busy_instance_can_not_take_it_back(monkeypatch, end):
    monkeypatch.setattr(adapter_calls, "UNDO_PAUSE_S", 0.01)

    async def run() -> None:
        held = CountingEngine(adapters={"a": "p"})
        picky = CountingEngine(adapters={"a": "p"}, refuse=frozenset({"bad"}))
        fleet, load, tries = fleet_of(held, picky), held._load_adapter, []
        registry = fleet._instance_registry

        async def loaded(name: str, path: str, *words: Any, **more: Any) -> AdapterInfo:
            if path == "p":
                tries.append(path)
                raise BusyError("a slot is held")
            return await load(name, path, *words, **more)

        monkeypatch.setattr(held, "_load_adapter", loaded)
        with pytest.raises(AdapterError, match="the others took it back"):
            await fleet.call("load_adapter", "a", "bad", replace=True)
        assert await registry.at_rest(), "instances that restart don't wait"
        assert fleet.instances[0].missing == {"a"}
        while len(tries) < 3:
            await asyncio.sleep(0.005)
        if end == "unload":
            await fleet.call("unload_adapter", "a")
        elif end == "load":
            await fleet.call("load_adapter", "a", "q", replace=True)
            assert held.adapters == picky.adapters == {"a": "q"}
        elif end == "gone":
            registry.lose(fleet.instances[0], held)
        else:
            registry.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S)

    asyncio.run(run())


def test_load_that_one_instance_refuses_is_taken_back_by_the_others():
    async def run() -> None:
        picky = CountingEngine(adapters={"old": "p"}, refuse=frozenset({"bad"}))
        easy = CountingEngine(adapters={"old": "p"})
        fleet = fleet_of(easy, picky)
        for name, in_place in (("new", False), ("old", True)):
            with pytest.raises(AdapterError, match=r"instance 1 refused.*took it back: bad can't be read"):
                await fleet.call("load_adapter", name, "bad", replace=in_place)
        assert easy.adapters == picky.adapters == {"old": "p"}
        info = await fleet.call("load_adapter", "old", "good", replace=True)
        assert info.version == 3, "requests may run with the refused second version"

    asyncio.run(run())


def test_instance_that_cannot_take_a_load_back_gets_no_requests_for_the_adapter():
    async def run() -> list[int]:
        stuck = CountingEngine(adapters={"a": "p"}, refuse=frozenset({"p"}))
        picky = CountingEngine(adapters={"a": "p"}, refuse=frozenset({"bad"}))
        fleet = fleet_of(stuck, picky)
        with pytest.raises(AdapterError):
            await fleet.call("load_adapter", "a", "bad", replace=True)
        for _ in range(2):
            await tokens_of(fleet, ask(adapter="a"))
        return [len(stuck.requests), len(picky.requests)]

    assert asyncio.run(run()) == [0, 2]


def test_adapter_missing_everywhere_is_named_until_it_is_loaded_or_unloaded():
    async def run() -> None:
        instance_registry = InstanceRegistry([CountingEngine(), CountingEngine()], [("a", "p")])
        fleet = fleet_client(instance_registry, LeastOutstanding())
        for instance in instance_registry.instances:
            instance.missing.add("a")
            instance.problems["a"] = "its rank is too large"
        [info] = await fleet.list_adapters()
        assert (info.residency, info.problem) == ("unavailable", "its rank is too large")
        with pytest.raises(EngineDeadError, match="'a' is unavailable: its rank is too large"):
            await tokens_of(fleet, ask(adapter="a"))
        await fleet.call("load_adapter", "a", "q", replace=True)
        assert await tokens_of(fleet, ask(adapter="a")) == list(range(2, 10))
        for instance in instance_registry.instances:
            instance.missing.add("a")
        await fleet.call("unload_adapter", "a")
        with pytest.raises(AdapterNotFoundError):
            await tokens_of(fleet, ask(adapter="a"))

    asyncio.run(run())


def test_an_adapter_that_no_instance_could_load_can_be_unloaded():
    async def run() -> None:
        instance_registry = InstanceRegistry([CountingEngine(), CountingEngine()], [("a", "p")])
        fleet = fleet_client(instance_registry, LeastOutstanding())
        for instance in instance_registry.instances:
            instance.missing.add("a")
        await fleet.call("unload_adapter", "a")
        assert await fleet.list_adapters() == []
        with pytest.raises(AdapterNotFoundError):
            await fleet.call("unload_adapter", "a")

    asyncio.run(run())


def test_what_every_instance_refuses_is_refused_as_one_engine_would():
    engines = [CountingEngine(refuse=frozenset({"bad"})) for _ in range(2)]
    with pytest.raises(AdapterError, match=r"^bad can't be read$"):
        asyncio.run(fleet_of(*engines).call("load_adapter", "a", "bad"))
    assert [engine.calls for engine in engines] == [[("load", "a", "bad")], []]


def test_instance_that_ends_while_loading_is_left_out():
    async def run() -> None:
        dying, other = CountingEngine(), CountingEngine()
        fleet = fleet_of(dying, other)
        load = asyncio.create_task(fleet.call("load_adapter", "a", "p"))
        await asyncio.sleep(0)
        dying.alive = False
        await load
        assert [one.live for one in (await fleet.stats()).instances] == [False, True]
        assert await tokens_of(fleet, ask(adapter="a")) == list(range(2, 10))

    asyncio.run(run())


def test_load_that_fails_after_its_caller_left_is_nobodys_error():
    said = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        engine = CountingEngine()
        load = asyncio.create_task(fleet_of(engine).call("load_adapter", "a", "p"))
        await asyncio.sleep(0)
        engine.alive = False
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled()
        [left] = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait([left])
        del left
        gc.collect()

    asyncio.run(run())
    assert said == []


def test_loads_of_one_name_at_once_leave_all_instances_alike():
    async def run() -> None:
        engines = CountingEngine(), CountingEngine()
        fleet = fleet_of(*engines)
        await asyncio.gather(*(fleet.call("load_adapter", "a", path, replace=True) for path in "pqr"))
        assert engines[0].adapters == engines[1].adapters == {"a": "r"}

    asyncio.run(run())


def test_numbers_of_an_ended_instance_stay_in_the_sums():
    async def run() -> None:
        counts = (0, 2, *(0,) * 12)
        now = EngineStats(
            num_running=2, kv_usage=0.5, generation_tokens=7, running_adapters=("b", "a"), step_counts=counts
        )
        first = CountingEngine(stats_now=now)
        fleet = fleet_of(first, CountingEngine(stats_now=EngineStats(num_running=1, generation_tokens=1)))
        both = await fleet.stats()
        assert (both.num_running, both.kv_usage, both.generation_tokens) == (3, 0.25, 8)
        assert both.running_adapters == ("a", "b")
        first.alive = False
        left = await fleet.stats()
        assert (left.num_running, left.kv_usage, left.generation_tokens) == (1, 0.0, 8)
        assert left.step_counts == both.step_counts == counts
        assert [one.num_running for one in left.instances] == [0, 1]

    asyncio.run(run())


def test_closing_ends_all_and_refuses_what_comes_later():
    async def run() -> None:
        engines = CountingEngine(), CountingEngine()
        fleet = fleet_of(*engines)
        await fleet.close()
        assert [engine.closed for engine in engines] == [True, True]
        with pytest.raises(EngineDeadError):
            await tokens_of(fleet, ask())

    asyncio.run(run())


def test_requests_of_an_adapter_that_is_refused_are_no_demand():
    async def run() -> None:
        meter = DemandMeter()
        instance_registry = InstanceRegistry([CountingEngine(adapters={"a": "p"})], [("a", "p")])
        fleet = fleet_client(instance_registry, LeastOutstanding(), meter=meter)
        for instance in ("0", "1"):
            instance_registry.suspects.note_death(instance, frozenset({"a"}))
        instance_registry.suspects._refuse("a", "1")
        for number in range(5):
            with pytest.raises(AdapterFailedError):
                await tokens_of(fleet, ask(str(number), adapter="a"))
        assert meter.read()["a"] == 0

    asyncio.run(run())


def test_books_tell_what_waits_and_runs_and_end_empty_whoever_ends():
    async def run() -> None:
        engines = [CountingEngine(dies_at=6, adapters={"a": "p"}), CountingEngine(adapters={"a": "p"})]
        meter = DemandMeter()
        instance_registry = InstanceRegistry(engines, [("a", "p")])
        fleet = fleet_client(instance_registry, LeastOutstanding(), meter=meter)
        first, second = (one.load for one in instance_registry.instances)
        stream = fleet.generate(ask(adapter="a"))
        await anext(stream)
        assert (dict(first.running), dict(first.waiting)) == ({"a": 1}, {})
        assert [token async for output in stream for token in output.token_ids] == list(range(3, 10))
        assert (first.num_requests, second.num_requests) == (0, 0)
        assert first.has("a")
        assert second.has("a")
        assert meter.read() == {"a": 2 + 8}, "a request counts once, wherever it goes on"
        with pytest.raises(AdapterNotFoundError):
            await tokens_of(fleet, ask("s", adapter="b"))
        assert (second.num_requests, second.waiting_tokens, meter.read()) == (0, 0, {})

    asyncio.run(run())


def test_one_that_comes_in_as_an_adapter_is_unloaded_frees_it_too(monkeypatch):
    here, late = (CountingEngine(adapters={"a": "places/a"}) for _ in range(2))
    instance_registry = InstanceRegistry([here], [("a", "places/a")])
    forget = instance_registry.forget

    def forget_after_it_came(name: str) -> None:
        joining = instance_registry.join(
            instance_registry.enter("late", late), late, instance_registry.adapters, set()
        )
        with pytest.raises(StopIteration) as done:  # at once, since nothing is being loaded
            joining.send(None)
        assert done.value.value
        forget(name)

    monkeypatch.setattr(instance_registry, "forget", forget_after_it_came)
    asyncio.run(FleetAdapters(instance_registry).call("unload_adapter", "a"))
    assert here.adapters == late.adapters == {}


def test_one_that_was_silent_and_is_back_before_others_have_answered_stays(monkeypatch):
    async def silent() -> list:
        raise EngineSilentError("it did not get on")

    back, other = CountingEngine(), CountingEngine(adapters={"a": "places/a"})
    monkeypatch.setattr(back, "list_adapters", silent)
    fleet = fleet_of(back, other)
    assert [info.name for info in asyncio.run(fleet.list_adapters())] == ["a"]
    assert len(fleet._instance_registry.live) == 2


def test_what_an_instance_failed_to_say_while_silent_takes_it_out_of_nothing_once_it_is_back():
    class Unread(CountingEngine):
        """Its stream says late that it was silent, behind tokens that nobody read in time."""

        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
            self.requests.append(request)
            yield TokenOutput(request_id=request.request_id, token_ids=(2,))
            raise EngineSilentError("it sent no beats")

    async def run() -> None:
        fleet = fleet_of(late := Unread(), CountingEngine(), router=RoundRobin())
        assert await tokens_of(fleet, ask()) == list(range(2, 10))
        assert len(late.requests) == 1
        assert [one.live for one in fleet.instances] == [True, True]
        assert [one.num_resent for one in fleet.instances] == [1, 0]

    asyncio.run(run())


def test_a_request_whose_move_off_a_drained_instance_failed_is_moved_once_more_and_never_twice_at_once():
    async def run() -> None:
        fleet = fleet_of(CountingEngine(), CountingEngine(), router=RoundRobin())
        registry, [first, second] = fleet._instance_registry, fleet.instances
        may_end, targets = asyncio.Event(), []

        async def refuse(resumable, target, *_):
            targets.append(target)
            await may_end.wait()
            raise MoveError("no room")

        stream = fleet.generate(ask())
        await anext(stream)
        with patch.object(fleet.mover, "move", refuse):
            registry.drains.order(first.name, drained=True)
            for _ in range(2):
                registry.on_drain(first)
                await asyncio.sleep(0.01)
            assert targets == [second.name]
            may_end.set()
            await asyncio.sleep(0.01)
            registry.on_drain(first)
            await asyncio.sleep(0.01)
            assert targets == [second.name] * 2
        assert len([output async for output in stream]) == 7

    asyncio.run(run())


def test_abort_of_a_request_that_waits_for_a_trial_ends_it_at_once(monkeypatch):
    monkeypatch.setattr("moe_lora.dist.cluster.suspects._LOOK_S", 1000.0)

    async def run() -> None:
        engines = [CountingEngine(adapters={"a": "a"}) for _ in range(2)]
        fleet = fleet_of(*engines)
        suspects = fleet._instance_registry.suspects
        suspects.note_death("0", frozenset({"a"}))
        trial = await suspects.admit("a")
        assert trial is not None
        waiting = [asyncio.create_task(all_of(fleet.generate(ask(name, "a")))) for name in ("first", "last")]
        await asyncio.sleep(0.05)
        await fleet.abort("first")
        [output] = await asyncio.wait_for(waiting[0], PATIENCE_S)
        assert output.finish_reason == "abort"
        assert not waiting[1].done()
        assert list(fleet._running) == ["last"]
        suspects.release(trial)
        outputs = await asyncio.wait_for(waiting[1], PATIENCE_S)
        assert outputs[-1].finish_reason == "length"
        assert not suspects, "the last request was the trial"
        assert not any("first" in request.request_id for engine in engines for request in engine.requests)

    asyncio.run(run())


def test_client_that_leaves_as_its_trial_begins_leaves_the_trial_to_the_next():
    async def run() -> None:
        engine = CountingEngine(adapters={"a": "a"})
        fleet = fleet_of(engine, CountingEngine(adapters={"a": "a"}))
        suspects = fleet._instance_registry.suspects
        suspects.note_death("0", frozenset({"a"}))
        trial = await suspects.admit("a")
        assert trial is not None
        leaving = asyncio.create_task(all_of(fleet.generate(ask("leaving", "a"))))
        await asyncio.sleep(0.05)
        suspects.release(trial)  # the waiting request is the next trial, and is aborted before it runs
        await fleet.abort("leaving")
        assert [one.finish_reason for one in await leaving] == ["abort"]
        assert await tokens_of(fleet, ask("next", "a")) == list(range(2, 10))
        assert not suspects

    asyncio.run(run())


def test_requests_that_stay_make_no_mover_and_moves_count_none():
    fleet = fleet_of(CountingEngine(), CountingEngine())
    assert asyncio.run(tokens_of(fleet, ask())) == list(range(2, 10))
    moves = asyncio.run(fleet.stats()).moves
    assert "mover" not in vars(fleet)
    assert (moves.num_moved, moves.num_failed, moves.pause_s) == ({"tokens": 0, "kv": 0}, 0, 0.0)


def test_router_that_listens_hears_of_each_answer_once():
    class Listening(LeastOutstanding, RequestListener):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def start(self, key, request, max_tokens=None):
            self.heard.append((key, request.prompt_tokens, max_tokens))

        def stop(self, key, answer_tokens):
            self.heard.append((key, answer_tokens))

        def cancel(self, key):
            self.heard.append(key)

    router = Listening()
    fleet = fleet_of(CountingEngine(dies_at=5), CountingEngine(), router=router)
    asyncio.run(tokens_of(fleet, ask()))
    assert router.heard == [("r", 2, 8), ("r", 8)]


async def all_of(outputs: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    return [output async for output in outputs]
