# SPDX-License-Identifier: Apache-2.0
"""The load on adapters over HTTP, and the LoRA Server's capacity: a scripted engine, a server on paper."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from moe_lora.cli.main import main
from moe_lora.config import ProvisionConfig
from moe_lora.core.errors import CapacityError, ConfigError, LoraServerError
from moe_lora.core.records import ServerState
from moe_lora.dist.cluster.controller import capacity_controller
from moe_lora.dist.cluster.controller.capacity_controller import CapacityController
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.provision.online import DemandWindow
from tests.patience import PATIENCE_S
from tests.virtual_clock import VirtualClock

from .conftest import app_of, as_served
from .live_server import Served, wait_until
from .scripted_engine import TIMING, adapter_info
from .test_metrics import samples, value

STATE = ServerState(
    capacity=2,
    max_capacity=20,
    num_resident=2,
    num_leases=1,
    num_waiting=3,
    num_loads=7,
    num_evictions=5,
    resident_bytes=200,
    loaded_bytes=700,
    num_instances=2,
    incarnation=1,
    ranks=(1, 1),
    unlinked=(0, 0),
)


class PaperServer:
    """Answers as a `LoraServerAdmin`."""

    def __init__(self) -> None:
        self.current = STATE
        self.next: ServerState | None = None
        self.gone = self.stays_away = self.stays_unlinked = False
        self.restarted: list[int] = []

    def state(self) -> ServerState:
        if self.gone:
            raise LoraServerError("no LoRA Server answers at lora_server.address=x")
        seen, self.current, self.next = self.current, self.next or self.current, None
        return seen

    def resize(self, capacity: int) -> ServerState:
        if capacity > self.current.max_capacity:
            raise CapacityError(f"capacity={capacity} is more than fits; choose at most 20")
        self.current = replace(self.state(), capacity=capacity)
        return self.current

    def restart(self, server_rank: int) -> None:
        """The rank is back at the next look but one; all of them with rank 0, the leader."""
        self.restarted.append(server_rank)
        ranks, incarnation = list(self.current.ranks), self.current.incarnation
        ranks[server_rank] += 1
        if server_rank == 0:
            ranks, incarnation = [1, 1], incarnation + 1
        if not self.stays_away:
            unlinked = tuple(int(self.stays_unlinked and one == server_rank) for one in range(2))
            back = {"ranks": tuple(ranks), "incarnation": incarnation, "unlinked": unlinked}
            self.next = replace(self.current, **back)
        self.current = replace(self.current, ranks=(self.current.ranks[0], 0))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def paper() -> PaperServer:
    return PaperServer()


@contextlib.contextmanager
def served_with(shared_thread, engine, tokenizer, controller: CapacityController | None) -> Iterator[Served]:
    switch, url = shared_thread
    has_server = controller is not None and controller._server is not None
    switch.app = app_of(engine, tokenizer, provision=controller, has_server=has_server)
    with as_served(url, engine) as served:
        yield served


@pytest.fixture
def controller(engine, paper, clock) -> CapacityController:
    return CapacityController(ProvisionConfig(target_iar=0.95), engine, paper, clock)


@pytest.fixture
def watched(shared_thread, engine, tokenizer, controller) -> Iterator[Served]:
    with served_with(shared_thread, engine, tokenizer, controller) as served:
        yield served


def load(window: DemandWindow, clock: VirtualClock, num_adapters: int, in_service: int = 4) -> None:
    """A while in which `in_service` requests run at any time, for each adapter in turn."""
    for turn in range(20 * num_adapters):
        visits = [window.begin(f"adapter-{(turn + one) % num_adapters}") for one in range(in_service)]
        for visit in visits:
            visit.start()
        clock.advance(1.0)
        for visit in visits:
            visit.end(replace(TIMING, adapter_wait_s=float(turn % 2), prefill_s=0.0))


def evaluated(controller: CapacityController) -> CapacityController:
    asyncio.run(controller.evaluate())
    return controller


def test_requests_over_http_are_the_load(watched, engine, controller, clock):
    engine.adapters["other"] = adapter_info("other")
    for model in ("shout", "shout", "other", "base", "nobody"):
        watched.post("/v1/completions", {"prompt": "hello", "model": model, "max_tokens": 3})
    watched.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"})
    clock.advance(10.0)
    demand = controller.window.demand()
    assert sorted(demand.counts.tolist()) == [2, 2], "neither the base nor what does not exist"
    assert demand.num_timed == demand.num_at_once == 4
    assert demand.global_batch == pytest.approx(4 * TIMING.prefill_s / 10.0), "the clock stood still"


def test_metrics_show_the_evaluation_and_the_server(watched, controller, clock):
    found = samples(watched)
    assert not any(key[0] == "moe_lora:iar_predicted" for key in found), "nothing was evaluated yet"
    load(controller.window, clock, 8)
    latest = evaluated(controller).latest
    found = samples(watched)
    assert value(found, "moe_lora:iar_predicted") == latest.predicted_iar < 0.95
    assert value(found, "moe_lora:iar_measured") == 0.5
    assert value(found, "moe_lora:iar_target") == 0.95
    assert value(found, "moe_lora:adapter_capacity") == 2
    assert value(found, "moe_lora:adapter_capacity_needed") == latest.needed_capacity > 2
    assert value(found, "moe_lora:expected_active_adapters") == latest.expected_active
    assert value(found, "moe_lora:global_batch") == pytest.approx(4.0)
    assert value(found, "moe_lora:lora_server_up") == 1
    assert value(found, "moe_lora:lora_server_capacity") == 2
    assert value(found, "moe_lora:lora_server_resident_adapters") == 2
    assert value(found, "moe_lora:lora_server_leases") == 1
    assert value(found, "moe_lora:lora_server_waiting") == 3
    assert value(found, "moe_lora:lora_server_loads_total") == 7
    assert value(found, "moe_lora:lora_server_evictions_total") == 5
    assert value(found, "moe_lora:lora_server_resident_bytes") == 200
    assert value(found, "moe_lora:lora_server_loaded_bytes_total") == 700


def test_the_document_names_every_metric_of_the_controller_and_no_other(
    watched, engine, tokenizer, shared_thread
):
    def exported(text: str) -> set[str]:
        families = text_string_to_metric_families(text)
        return {f.name + ("_total" if f.type == "counter" else "") for f in families}

    page = (Path(__file__).parents[2] / "docs" / "reference" / "prometheus.md").read_text()
    with_controller = exported(watched.get("/metrics").text)
    switch, _ = shared_thread
    switch.app = app_of(engine, tokenizer)
    without = exported(watched.get("/metrics").text)
    named = set(re.findall(r"`(moe_lora:\w+)`", page.split("## Provisioning")[1].split("## Placement")[0]))
    assert named == with_controller - without


def test_server_that_does_not_answer_is_shown_as_down(watched, controller, paper, clock, caplog):
    load(controller.window, clock, 8)
    evaluated(controller)
    paper.gone = True
    evaluated(evaluated(controller))
    assert caplog.text.count("no LoRA Server answers") == 1
    found = samples(watched)
    assert value(found, "moe_lora:lora_server_up") == 0
    assert not any(key[0] in ("moe_lora:iar_predicted", "moe_lora:lora_server_capacity") for key in found)
    response = watched.get("/v1/lora_server")
    assert response.status_code == 503
    assert "no LoRA Server answers" in response.json()["error"]["message"]


def test_state_and_evaluation_can_be_read(watched, controller, clock):
    assert watched.get("/v1/provision").json()["latest"] is None
    load(controller.window, clock, 8)
    latest = evaluated(controller).latest
    shown = watched.get("/v1/provision").json()
    assert shown["settings"]["target_iar"] == 0.95
    assert shown["latest"]["needed_capacity"] == latest.needed_capacity
    assert shown["latest"]["suffices"] is False
    assert watched.get("/v1/lora_server").json()["num_waiting"] == 3


def test_capacity_is_changed_over_http_and_by_the_command(watched, paper):
    response = watched.post("/v1/lora_server/capacity", {"capacity": 9})
    assert (response.status_code, response.json()["capacity"]) == (200, 9)
    assert paper.current.capacity == 9
    result = CliRunner().invoke(main, ["capacity", "11", "--url", watched.url])
    assert result.exit_code == 0, result.output
    assert "capacity 11 (at most 20), resident 2" in result.output
    assert paper.current.capacity == 11
    assert "capacity 11 " in CliRunner().invoke(main, ["capacity", "--url", watched.url]).output


@pytest.mark.parametrize("body", [{"capacity": 0}, {"capacity": "many"}, {}, {"capacity": 3, "now": True}])
def test_bodies_that_name_no_capacity_are_400(watched, paper, body):
    assert watched.post("/v1/lora_server/capacity", body).status_code == 400
    assert paper.current == STATE


def test_capacity_beyond_memory_is_400_with_what_fits(watched, paper):
    response = watched.post("/v1/lora_server/capacity", {"capacity": 21})
    assert response.status_code == 400
    assert "choose at most 20" in response.json()["error"]["message"]
    result = CliRunner().invoke(main, ["capacity", "21", "--url", watched.url])
    assert (result.exit_code, paper.current.capacity) == (1, 2)
    assert "choose at most 20" in result.output


def test_command_says_when_no_server_answers():
    result = CliRunner().invoke(main, ["capacity", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no moe-lora server answers at http://127.0.0.1:1" in result.output


@pytest.mark.parametrize("path", ["/v1/provision", "/v1/lora_server"])
def test_without_a_controller_there_is_nothing_to_see(server, path):
    response = server.get(path)
    assert response.status_code == 404
    assert "LoRA Server" in response.json()["error"]["message"]


def test_without_a_lora_server_instances_have_their_own_places(shared_thread, engine, tokenizer, clock):
    controller = CapacityController(ProvisionConfig(), engine, None, clock)
    load(controller.window, clock, 8)
    assert evaluated(controller).latest.capacity == 4, "max_loras of the engine"
    with served_with(shared_thread, engine, tokenizer, controller) as served:
        assert value(samples(served), "moe_lora:adapter_capacity") == 4
        assert not any(key[0] == "moe_lora:lora_server_up" for key in samples(served))
        assert served.get("/v1/provision").json()["latest"]["capacity"] == 4
        assert served.post("/v1/lora_server/capacity", {"capacity": 3}).status_code == 404


def test_a_line_is_logged_when_the_capacity_stops_sufficing_and_when_it_does_again(
    controller, paper, clock, caplog
):
    caplog.set_level(logging.INFO, "moe_lora.dist.cluster.controller.capacity_controller")
    load(controller.window, clock, 2)
    evaluated(controller)
    assert not caplog.messages
    load(controller.window, clock, 12)
    evaluated(evaluated(controller))
    assert [message.split(":")[0] for message in caplog.messages] == ["room for 2 adapters is too little"]
    paper.resize(12)
    evaluated(evaluated(controller))
    assert [message.split(":")[0] for message in caplog.messages[1:]] == [
        "room for 12 adapters is enough again"
    ]


def test_capacity_follows_the_load_if_asked_to(engine, paper, clock):
    controller = CapacityController(ProvisionConfig(auto_resize=True), engine, paper, clock)
    load(controller.window, clock, 8)
    needed = evaluated(controller).latest.needed_capacity
    grown = paper.current.capacity
    assert needed <= grown <= needed + 2
    evaluated(controller)
    assert (paper.current.capacity, controller.latest.suffices) == (grown, True)
    clock.advance(400.0)
    evaluated(controller)
    assert paper.current.capacity == grown, "silence says nothing"
    load(controller.window, clock, 30, in_service=30)
    evaluated(controller)
    assert paper.current.capacity == 20, "what memory holds"
    load(controller.window, clock, 1)
    clock.advance(290.0)
    load(controller.window, clock, 1)
    evaluated(controller)
    assert paper.current.capacity < 4


def test_evaluations_go_on_after_one_that_failed(engine, paper, clock, monkeypatch, caplog):
    controller = CapacityController(ProvisionConfig(interval_s=0.001), engine, paper, clock)
    calls = iter([ZeroDivisionError("bad day"), ZeroDivisionError("bad day")])

    def sometimes() -> ServerState:
        error = next(calls, None)
        if error is not None:
            raise error
        return STATE

    monkeypatch.setattr(paper, "state", sometimes)

    async def watch() -> None:
        task = asyncio.create_task(controller.run())
        while controller.latest is None:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), PATIENCE_S))
    assert caplog.text.count("can't be evaluated") == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_iar": 0.0}, "provision.target_iar=0.0"),
        ({"target_iar": 1.5}, "provision.target_iar=1.5"),
        ({"window_s": 0.0}, "provision.window_s=0.0"),
        ({"interval_s": float("nan")}, "provision.interval_s=nan"),
        ({"min_capacity": 0}, "provision.min_capacity=0"),
    ],
)
def test_settings_that_can_not_be_are_named(settings, named):
    with pytest.raises(ConfigError, match=named):
        ProvisionConfig(**settings)


def test_ranks_are_started_again_in_turn_the_leader_last(watched, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    done = CliRunner().invoke(main, ["restart", "--lora-server", "--url", watched.url])
    assert (done.exit_code, done.output) == (0, "the LoRA Server's 2 ranks were started again\n")
    assert paper.restarted == [1, 0]
    assert watched.get("/v1/lora_server").json()["incarnation"] == 2


LIMITS_S = (0.1, 1.0, 10.0, PATIENCE_S)
"""The next one if the limit was over before a rank was ended."""


def test_a_rank_that_does_not_come_back_is_a_503_that_says_so(watched, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    paper.stays_away = True
    for limit_s in LIMITS_S:
        answer = watched.post(f"/v1/lora_server/restart?limit_s={limit_s}", {})
        if paper.restarted:
            break
    assert answer.status_code == 503
    assert "rank 1 of the LoRA Server was ended and is not back" in answer.json()["error"]["message"]
    assert paper.restarted == [1]


def test_a_layout_is_changed_by_the_keeper_alone(watched, controller, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    refused = watched.post("/v1/lora_server/layout?layout=EP4-PP1", {})
    assert refused.status_code == 400
    assert "the LoRA Server's layout is fixed: only moe-lora serve" in refused.json()["error"]["message"]
    assert "torchrun --nproc-per-node 4 -m moe_lora.dist" in refused.json()["error"]["message"]
    following, asked = PaperServer(), []
    following.current = replace(STATE, ranks=(1, 1, 1, 0), unlinked=(0,) * 4)
    following.next = replace(STATE, ranks=(1,) * 4, unlinked=(0,) * 4)
    resizes = []

    async def relayout(*words):
        asked.append(words)
        resizes.append(asyncio.create_task(controller.resize(5)))
        await asyncio.sleep(0)
        return "/there"

    monkeypatch.setattr(capacity_controller, "LoraServerAdmin", lambda address, keys: following)
    controller.relayout = relayout
    found = watched.post("/v1/lora_server/layout?layout=EP4-PP1&limit_s=90", {})
    assert (found.status_code, found.json()["ranks"]) == (200, [1] * 4)
    assert asked == [("EP4-PP1", STATE.capacity, 90.0)]
    wait_until(lambda: resizes[0].done(), "the resize is over")
    assert (paper.current.capacity, following.current.capacity) == (STATE.capacity, 5)
    following.current = replace(following.current, num_instances=0)
    paper.current = replace(STATE, num_instances=2)
    controller._server = paper
    lacking = watched.post("/v1/lora_server/layout?layout=EP4-PP1&limit_s=0.1", {})
    assert lacking.status_code == 503
    assert "the LoRA Server is EP4-PP1, but after" in lacking.json()["error"]["message"]


def test_nothing_else_changes_while_the_keeper_changes_the_layout_for_a_former_controller(
    watched, controller, paper, monkeypatch
):
    async def relayout(*words) -> str:
        raise AssertionError(words)

    monkeypatch.setattr(capacity_controller, "LoraServerAdmin", lambda address, keys: paper)
    controller.relayout = relayout
    controller.use_lora_server("/former", True)
    for change, body in (("capacity", {"capacity": 5}), ("restart", {}), ("layout?layout=EP4-PP1", {})):
        refused = watched.post(f"/v1/lora_server/{change}", body)
        assert refused.status_code == 503
        assert "the LoRA Server's layout is changing" in refused.json()["error"]["message"]
    assert (paper.current, paper.restarted) == (STATE, [])
    controller.use_lora_server("/next", False)
    assert watched.post("/v1/lora_server/capacity", {"capacity": 5}).status_code == 200
    assert paper.current.capacity == 5


def test_no_rank_is_ended_while_another_is_away(controller, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    for lacking in ({"ranks": (1, 0)}, {"unlinked": (1, 0)}):
        paper.current = replace(STATE, **lacking)
        with pytest.raises(LoraServerError, match="no rank of the LoRA Server was ended"):
            asyncio.run(controller.restart_server(0.1))
        assert paper.restarted == []
    paper.current, paper.next = replace(STATE, ranks=(1, 0)), replace(STATE, ranks=(1, 2))
    asyncio.run(controller.restart_server(20.0))
    assert paper.restarted == [1, 0]


def leave(controller: CapacityController, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two instances leaves at the next look."""
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    counts = [2]
    controller.num_known = lambda: counts.pop() if counts else 1


def test_a_restart_waits_for_an_instance_that_crashes_meanwhile(watched, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    in_routing = property(lambda registry: ["instance-0", "instance-1"][: 1 if paper.restarted else 2])
    monkeypatch.setattr(InstanceRegistry, "live", in_routing)
    state, counts = paper.state, [1] * 20

    def seen() -> ServerState:
        return replace(state(), num_instances=counts.pop() if paper.restarted and counts else 2)

    monkeypatch.setattr(paper, "state", seen)
    found = watched.post(f"/v1/lora_server/restart?limit_s={PATIENCE_S}", {})
    assert (found.status_code, counts) == (200, [])
    assert paper.restarted == [1, 0]


def test_an_instance_that_left_before_is_not_subtracted_again(controller, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    known, counts = [2, 1], [0] * 20
    controller.num_known = lambda: known.pop(0) if len(known) > 1 else known[0]
    state = paper.state

    def seen() -> ServerState:
        number = counts.pop() if paper.restarted and counts else 1
        return replace(state(), num_instances=number)

    monkeypatch.setattr(paper, "state", seen)
    asyncio.run(controller.restart_server(PATIENCE_S))
    assert not counts


def test_a_restart_waits_for_no_instance_that_leaves_meanwhile(controller, paper, monkeypatch):
    leave(controller, monkeypatch)
    restart = paper.restart

    def restarted(server_rank: int) -> None:
        restart(server_rank)
        paper.next = replace(paper.next, num_instances=1)

    paper.restart = restarted
    assert asyncio.run(controller.restart_server(PATIENCE_S)).num_instances == 1
    assert paper.restarted == [1, 0]


def test_a_change_of_layout_waits_for_no_instance_that_leaves_meanwhile(controller, paper, monkeypatch):
    leave(controller, monkeypatch)
    following = PaperServer()
    following.current = replace(STATE, num_instances=1)
    monkeypatch.setattr(capacity_controller, "LoraServerAdmin", lambda address, keys: following)

    async def relayout(*words) -> str:
        return "/there"

    controller.relayout = relayout
    assert asyncio.run(controller.change_layout("EP2-PP1", PATIENCE_S)) == following.current


def test_two_restarts_at_once_come_one_after_the_other(controller, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)

    async def run() -> None:
        await asyncio.gather(*(controller.restart_server(20.0) for _ in range(2)))

    asyncio.run(run())
    assert paper.restarted == [1, 0, 1, 0]


def test_no_rank_is_ended_while_an_instance_lacks_its_link_to_the_one_before(controller, paper, monkeypatch):
    monkeypatch.setattr(capacity_controller, "LOOK_S", 0.01)
    paper.stays_unlinked = True
    for limit_s in LIMITS_S:
        with pytest.raises(LoraServerError) as refused:
            asyncio.run(controller.restart_server(limit_s))
        if paper.restarted:
            break
    assert "rank 1 of the LoRA Server was ended and is not back" in str(refused.value)
    assert paper.restarted == [1]
    assert paper.current.unlinked == (0, 1)
