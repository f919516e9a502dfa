# SPDX-License-Identifier: Apache-2.0
"""An instance moves from one LoRA Server to another of another layout, in the middle of answers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import CapacityError, ConfigError, EngineDeadError, LoraServerError
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.lora_server.attach import LeaseClient, LoraServerClient
from moe_lora.dist.lora_server.control import network
from moe_lora.dist.lora_server.leader import Leader
from moe_lora.dist.lora_server.messages import AdapterFailed
from moe_lora.engine.core import EngineCore
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.verbs import EngineVerbs, Steps
from moe_lora.families import shape_of
from tests.dist.lora_server.cluster import Cluster, until
from tests.engine.ranks.faulty_follower import use_faulty_followers
from tests.engine.test_switching import MODEL, ask, drive, engine, tokens_of
from tests.models.generated_code import captured_graphs
from tests.patience import PATIENCE_S

NUM = 60


@contextmanager
def servers(*layouts: str, ranks: tuple[int, int] = (1, 1), **settings) -> Iterator[list[Cluster]]:
    """Running servers of one store.  ranks: expert_parallel and tensor_parallel of instances."""
    shape = shape_of(read_config(MODEL))
    first = Cluster(shape, layouts[0], **settings)
    found = [
        first,
        *(Cluster(shape, one, store_dir=first.config.store_dir, **settings) for one in layouts[1:]),
    ]
    for one in found:
        one.ranks = ranks
    with first, found[1]:
        yield found


def moving(core: EngineCore, cluster: Cluster, limit_s: float = PATIENCE_S) -> Steps[None]:
    server = cluster.config
    return EngineVerbs(core, None, None, None).join_lora_server(server.address, server.layout, limit_s)


class Driven:
    """An engine with requests under way.  outputs: by request.  reached: leases before the move itself."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.outputs, self.num_steps = core, defaultdict(list), 0
        self.finish_reasons: dict[str, str | None] = {}

    def step(self) -> None:
        self.num_steps += 1
        for output in self.core.step():
            self.outputs[output.request_id] += output.token_ids
            self.finish_reasons[output.request_id] = output.finish_reason

    def step_until(self, condition) -> None:
        until(lambda: self.step() or condition())

    def move(self, cluster: Cluster, change: Callable[[], None] = lambda: None) -> None:
        """By the verb; steps go on while the verb waits.  change: called before the move itself."""
        steps = moving(self.core, cluster)
        try:
            waited = next(steps)
        except StopIteration:
            return
        self.step_until(waited.done)
        if waited.exception() is None:
            _, self.reached, _ = waited.result()
            change()
        self.end_move(steps, waited)

    def end_move(self, steps: Steps[None], waited: Future[object]) -> None:
        with contextlib.suppress(StopIteration):
            while True:
                self.step_until(waited.done)
                waited = steps.send(waited)

    def end(self) -> dict[str, list[int]]:
        while self.core.has_work:
            self.step()
            time.sleep(1e-4)
        return dict(self.outputs)


@pytest.fixture
def refused(monkeypatch) -> set[str]:
    """Content hashes that leaders refuse from now on."""
    found: set[str] = set()
    register = Leader.register

    async def refusing(leader: Leader, visitor: object, adapter_id: str) -> bool:
        if adapter_id in found:
            raise CapacityError("too large")
        return await register(leader, visitor, adapter_id)

    monkeypatch.setattr(Leader, "register", refusing)
    return found


def requests():
    policy, second = ask("a", max_tokens=NUM), ask("b", adapter="second", max_tokens=NUM)
    return policy, second, ask("c", adapter="second", max_tokens=NUM, prompt_token_ids=(1, *range(50, 70)))


def expected() -> dict[str, list[int]]:
    with engine() as core:
        return {name: tokens_of(outputs) for name, outputs in drive(core, *requests()).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"eager": False}, marks=pytest.mark.slow),
        pytest.param({"expert_parallel": 2}, marks=pytest.mark.slow),
        {"expert_parallel": 2, "tensor_parallel": 2},
    ],
)
def test_answers_go_on_with_the_same_tokens_and_no_row_is_computed_by_the_instance(settings):
    ranks = settings.get("expert_parallel", 1), settings.get("tensor_parallel", 1)
    with (
        captured_graphs(),
        servers("EP2-PP1", "EP4-PP1", ranks=ranks) as (former, following),
        engine(lora_server=former.config, **settings) as core,
    ):
        driven = Driven(core)
        for one in requests():
            core.add_request(one)
        driven.step_until(lambda: len(driven.outputs) == 3)
        for there, here in ((following, former), (former, following)):
            before = [there.rank(number).loop.num_requests for number in range(there.num_ranks)]
            driven.move(there)
            gone = [here.rank(number).loop.num_requests for number in range(here.num_ranks)]
            driven.step_until(
                lambda there=there, before=before: all(
                    there.rank(number).loop.num_requests > count for number, count in enumerate(before)
                )
            )
            assert core.has_work
            assert gone == [here.rank(number).loop.num_requests for number in range(here.num_ranks)]
        assert driven.end() == expected()
        assert core.stats().lora_server_fallback_rows == 0
        driven.move(former)  # is there already
        core.add_request(ask("again"))
        assert driven.end()["again"] == driven.outputs["a"][: len(driven.outputs["again"])]


@contextmanager
def two_ranks(
    monkeypatch, fault: str, numbers: tuple[int, int] = (2, 1)
) -> Iterator[tuple[Driven, Cluster, Cluster]]:
    """An instance with requests, whose follower has this fault once; the former and the next server."""
    use_faulty_followers(monkeypatch, {fault: 1})
    with (
        servers("EP2-PP1", "EP4-PP1", ranks=numbers) as (former, following),
        engine(lora_server=former.config, expert_parallel=numbers[0], tensor_parallel=numbers[1]) as core,
    ):
        driven = Driven(core)
        for one in requests():
            core.add_request(one)
        driven.step_until(lambda: len(driven.outputs) == 3)
        yield driven, former, following


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_messages_and_rows_of_a_follower_count_too(numbers, monkeypatch):
    """The counters that other tests hold at 0 see all ranks."""
    with two_ranks(monkeypatch, "no_session", numbers) as (driven, server, _):
        assert driven.end() == expected()
        assert driven.core.stats().lora_server_fallback_rows > 0
        assert driven.core.rank.lora_server.backend.num_fallback_rows == 0
        num_answered = sum(server.rank(number).loop.num_requests for number in range(2))
        until(lambda: driven.core.stats().lora_server_requests == num_answered)


def test_a_follower_without_a_connection_keeps_all_ranks_at_the_former_server(monkeypatch):
    with two_ranks(monkeypatch, "no_reach") as (driven, former, following):
        core = driven.core
        with pytest.raises(
            LoraServerError, match=r"rank 1 .* does not reach .*: this follower reaches nobody"
        ):
            driven.move(following)
        assert core.rank.config.lora_server == former.config
        before = [former.rank(number).loop.num_requests for number in range(2)]
        driven.step_until(
            lambda: all(former.rank(number).loop.num_requests > before[number] for number in range(2))
        )
        assert not any(following.rank(number).loop.num_requests for number in range(4))
        assert core.has_work
        driven.move(following)
        assert driven.end() == expected()
        assert all(following.rank(number).loop.num_requests for number in range(4))
        assert core.stats().lora_server_fallback_rows == 0


def test_a_follower_that_is_killed_while_it_connects_ends_the_engine_and_the_move(monkeypatch):
    with two_ranks(monkeypatch, "killed_in_reach") as (driven, _, following):
        core = driven.core
        waited = next(moving(core, following))
        with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
            driven.step_until(waited.done)
        core.close(at_once=True)
        with pytest.raises(LoraServerError, match=r"rank 1 .* does not reach"):
            waited.result(PATIENCE_S)


def test_adapters_that_change_meanwhile_are_those_of_the_next_server():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)

        def change() -> None:
            core.adapters.remove("second")
            path = dict(core.rank.config.adapters)["policy"]
            core.add_adapter(core.read_adapter("third", path), path)

        driven.move(following, change)
        core.add_request(ask("a"))
        core.add_request(ask("t", adapter="third"))
        found = driven.end()
        assert found["a"] == found["t"]
        assert core.stats().lora_server_fallback_rows == 0


def test_a_move_waits_for_no_register_of_a_late_adapter(monkeypatch):
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven, waited = Driven(core), []

        def change() -> None:
            path = dict(core.rank.config.adapters)["policy"]
            core.add_adapter(core.read_adapter("third", path), path)
            monkeypatch.setattr(LeaseClient, "register", lambda client, adapter_id: waited.append(adapter_id))

        core.adapters.remove("policy")
        driven.move(following, change)
        core.add_request(ask("t", adapter="third"))
        assert driven.end()["t"]
        assert waited == []
        assert core.stats().lora_server_fallback_rows == 0


def test_a_request_that_starts_before_the_move_has_its_lease_after_the_move(monkeypatch):
    """Of an adapter without a request so far, while the next leader needs some steps for the lease."""
    acquire, waiting_for = Leader.acquire, []

    async def late(leader: Leader, *asked: object) -> object:
        for driven in waiting_for:
            until_step = driven.num_steps + 3
            while driven.num_steps < until_step and driven.core.has_work:
                await asyncio.sleep(0.001)
        return await acquire(leader, *asked)

    monkeypatch.setattr(Leader, "acquire", late)
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        first, second, _ = requests()
        core.add_request(first)
        driven.step_until(lambda: driven.outputs["a"])

        def change() -> None:
            core.add_request(second)
            driven.step_until(lambda: driven.outputs["b"])
            waiting_for.append(driven)

        driven.move(following, change)
        assert core.has_work
        found = driven.end()
        assert found == {name: tokens for name, tokens in expected().items() if name in found}
        assert core.stats().lora_server_fallback_rows == 0


def test_an_adapter_that_the_next_server_refuses_keeps_the_former_server(refused):
    with (
        servers("EP4-PP1", "EP1-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        refused.update(one.packed.content_hash for one in core.adapters.versions.values())
        driven = Driven(core)
        core.add_request(ask("a", max_tokens=NUM))
        driven.step_until(lambda: driven.outputs["a"])
        with pytest.raises(CapacityError, match=r"the next LoRA Server refuses adapter .*: too large"):
            driven.move(following)
        core.add_request(ask("b"))
        found = driven.end()
        assert found["b"] == found["a"][: len(found["b"])]
        assert core.rank.config.lora_server == former.config
        assert core.stats().lora_server_fallback_rows == 0


def test_a_late_adapter_that_the_next_server_refuses_is_computed_by_the_instance(refused):
    """No request waits for ever for its lease."""
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        core.adapters.remove("second")

        def change() -> None:
            path = dict(core.rank.config.adapters)["second"]
            packed = core.read_adapter("second", path)
            core.add_adapter(packed, path)
            refused.add(packed.content_hash)

        driven.move(following, change)
        core.add_request(ask("b", adapter="second"))
        assert driven.end()["b"]
        assert core.stats().lora_server_fallback_rows > 0


def test_a_failure_at_the_next_server_ends_requests_after_the_move_alone():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven, before = Driven(core), []
        core.add_request(ask("a", max_tokens=NUM))
        driven.step_until(lambda: driven.outputs["a"])

        def change() -> None:
            [adapter] = core.adapters.leases.resident()
            network().run(driven.reached._hear(None, AdapterFailed(adapter.packed.content_hash, "no memory")))
            driven.step()
            before.append((core.has_work, adapter.lease is not None, core.adapters.failures.reports.empty()))

        driven.move(following, change)
        assert before == [(True, True, True)]
        driven.end()
        assert driven.finish_reasons["a"] == "error"


def test_a_lost_file_is_written_again_after_a_move():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        driven.move(following)
        shutil.rmtree(following.config.store_dir)
        for number in (1, 0):
            following.stop(number)
        until(lambda: not core.adapters.leases._leases.connected)
        for number in (0, 1):
            following.start(number)
        until(lambda: list(Path(following.config.store_dir).glob("*.safetensors")), "a file is there")


def test_a_server_that_ends_before_the_move_is_refused():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        leases = core.adapters.leases
        other = leases.leases_at(core.rank.reach(following.config))
        for number in (1, 0):
            following.stop(number)
        until(lambda: not other.connected)
        with pytest.raises(LoraServerError, match="the next LoRA Server is away"):
            other.check(leases._leases)
        other.stop()
        core.add_request(ask("a"))
        assert driven.end()["a"]


def test_a_server_that_ends_while_the_instance_waits_for_leases_is_refused():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        core.add_request(ask("a", max_tokens=NUM))
        driven.step_until(lambda: driven.outputs["a"])

        def change() -> None:
            for number in (1, 0):
                following.stop(number)
            until(lambda: not driven.reached.connected)

        with pytest.raises(LoraServerError, match="the next LoRA Server is away"):
            driven.move(following, change)
        until(driven.reached._joined.done, "the leases there are closed")
        assert core.rank.config.lora_server == former.config
        assert driven.end()["a"]
        assert core.stats().lora_server_fallback_rows == 0


def test_a_move_that_waits_for_a_server_lets_adapters_load(monkeypatch):
    gate, reach = threading.Event(), Rank.reach
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
        ThreadPoolExecutor(1) as files,
    ):
        monkeypatch.setattr(Rank, "reach", lambda *asked: gate.wait(PATIENCE_S) and reach(*asked))
        verbs, server = EngineVerbs(core, files, None, None), following.config
        steps = verbs.join_lora_server(server.address, server.layout, PATIENCE_S)
        waited = next(steps)
        path = dict(core.rank.config.adapters)["policy"]
        try:
            assert next(verbs.load_adapter("third", path)).result(PATIENCE_S)
            assert not waited.done()
        finally:
            gate.set()
        Driven(core).end_move(steps, waited)
        assert core.rank.config.lora_server == server


def test_a_move_ends_with_its_limit_at_the_former_server():
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        with pytest.raises(LoraServerError):
            driven.end_move(steps := moving(core, following, 0.0), next(steps))
        assert core.rank.config.lora_server == former.config
        core.add_request(ask("a"))
        driven.move(following)
        assert driven.end()["a"]
        assert core.stats().lora_server_fallback_rows == 0


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_second_call_waits_for_the_move_under_way_and_another_address_is_refused(
    succeeds, refused, monkeypatch
):
    """By the next controller, or by a keeper that gives the change up."""
    reach, reached = Rank.reach, []
    with (
        servers("EP1-PP1", "EP2-PP1") as (former, following),
        engine(lora_server=former.config) as core,
    ):
        driven = Driven(core)
        if not succeeds:
            refused.update(one.packed.content_hash for one in core.adapters.versions.values())

        def counted(rank: Rank, server: LoraServerConfig, limit_s: float) -> LoraServerClient:
            reached.append(server.address)
            return reach(rank, server, limit_s)

        monkeypatch.setattr(Rank, "reach", counted)
        first, second = moving(core, following), moving(core, following)
        reaching, waited = next(first), next(second)
        with pytest.raises(LoraServerError, match="is about to move to the LoRA Server at"):
            next(moving(core, former))
        assert not waited.done()
        problem = contextlib.nullcontext() if succeeds else pytest.raises(CapacityError, match="too large")
        with problem:
            driven.end_move(first, reaching)
        assert waited.done()
        with problem:
            driven.end_move(second, waited)
        assert core.rank.config.lora_server == (following if succeeds else former).config
        assert set(reached) == {following.config.address}
        assert len(reached) == (1 if succeeds else 2), "a failed move is tried again"
        driven.move(former)
        assert core.rank.config.lora_server.address == former.config.address


def test_an_engine_without_a_lora_server_refuses():
    with engine() as core, pytest.raises(ConfigError, match="no LoRA Server to move from"):
        next(EngineVerbs(core, None, None, None).join_lora_server("/nowhere", "EP1-PP1", 1.0))
