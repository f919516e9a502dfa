# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances, in both simulators: small clusters by hand, and an M/D/1 queue.

A decode row takes 10 ms, a prompt token 1 ms, of any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.migration import ACK_S, MOVES_AT_ONCE, READY_S
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.policies.routing.routing import LeastOutstanding
from moe_lora.provision.replayed.system import System
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    PlacementConfig,
    PromptInstances,
    SimLoraServerConfig,
    StepRows,
    SystemConfig,
)
from moe_lora.sim import prefill_first
from moe_lora.sim.instance import CachedConfig
from moe_lora.sim.lora_server import SimServerConfig
from moe_lora.sim.prefill_first import MOVE_READY_S, RETRIES_AT_ONCE, RETRY_READY_S, PrefillConfig
from moe_lora.sim.replicas import Replicas, ReplicasConfig, SimMigration
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import PlannedRequest, TurnRequest

from .systems import flat_profile, server

AT_ONCE = 1e12
TIME = TransformerTime(
    num_params=1e6, num_layers=1, hidden_size=0, kv_token_bytes=1, flops_per_s=1e10, bytes_per_s=2e8
)


class Layers:
    def layer_s(self, step: StepRows) -> tuple[float, float]:
        return 0.01 * step.num_rows + 0.001 * step.num_prompt_tokens, 0.0


@dataclass
class Done:
    """Of a request: first and last token."""

    first_s: float
    last_s: float


@dataclass
class Ran:
    done: dict[int, Done]
    num_moved: int
    num_failed: int
    cluster: Any


def prefill(num_instances: int = 1, bytes_per_s: float = AT_ONCE) -> PrefillConfig:
    return PrefillConfig(num_instances=num_instances, kv_token_bytes=1.0, link_bytes_per_s=bytes_per_s)


def fast(
    asked: Sequence[PlannedRequest],
    config: PrefillConfig,
    num_instances: int = 2,
    lease_s: float | None = None,
    **limits: Any,
) -> Ran:
    """lease_s: of a LoRA Server beside the instances for answers."""
    instance = InstanceConfig(layers=Layers(), **limits)
    local = LocalConfig(capacity=8, blocking=False, prefetched=["a"])
    at_server = SimLoraServerConfig(capacity=8, control_s=lease_s or 0.0, prefetched=["a"])
    system = System(
        SystemConfig(
            num_instances=num_instances,
            instance=instance,
            adapters=local if lease_s is None else at_server,
            prefill=config,
            prompts=None if lease_s is None else PromptInstances(instance=instance, adapters=local),
        )
    )
    system.replay(asked)
    assert system.prefill_first is not None
    done = {one.index: Done(one.first_token_s, one.finish_s) for one in system.requests}
    return Ran(done, system.prefill_first.num_moved, system.prefill_first.num_failed, system)


def real(
    asked: Sequence[PlannedRequest],
    config: PrefillConfig,
    num_instances: int = 2,
    num_device_pages: int = 2000,
    lease_s: float | None = None,
    **limits: Any,
) -> Ran:
    names = {one.adapter for one in asked if one.adapter is not None}
    prompts = CachedConfig(
        time=TIME,
        adapter_pages=dict.fromkeys(names, 1),
        num_device_pages=num_device_pages,
        num_host_pages=0,
        link_bytes_per_s=AT_ONCE,
        block_size=16,
        layers=Layers().layer_s,
        **limits,
    )
    server = None
    if lease_s is not None:
        settings: dict[str, Any] = {"num_layers": 1, "layer_load_s": 0.0, "control_s": lease_s}
        server = SimServerConfig(capacity=8, prefetched=["a"], **settings)
    replicas = Replicas(
        ReplicasConfig(
            num_replicas=num_instances,
            instance=prompts if server is None else replace(prompts, adapter_pages=dict.fromkeys(names, 0)),
            caching=lambda: make_caching_policy("lru", prompts.costs()),
            router=LeastOutstanding,
            preloaded=[["a"] if "a" in names else [], *[[]] * (num_instances - 1)],
            server=server,
            prefill=config,
            prompts=None if server is None else prompts,
        ),
        turns(asked),
    )
    assert replicas.prefill_first is not None
    done = {one.planned.index: Done(one.first_token_s, one.finish_s) for one in replicas.done}
    return Ran(done, replicas.prefill_first.num_moved, replicas.prefill_first.num_failed, replicas)


def turns(asked: Sequence[PlannedRequest]) -> list[TurnRequest]:
    ids = iter(range(10**9))
    return [
        TurnRequest(
            one.index,
            one.arrival_s,
            one.adapter,
            tuple(next(ids) for _ in range(one.prompt_tokens)),
            (7,) * one.output_tokens,
        )
        for one in asked
    ]


def requests(*rows: tuple[float, int, int], adapter: str | None = None) -> list[PlannedRequest]:
    """From (arrival_s, prompt tokens, output tokens)."""
    return [PlannedRequest(index, at, adapter, *lengths) for index, (at, *lengths) in enumerate(rows)]


def stamps(ran: Ran) -> list[tuple[float, float]]:
    return [(ran.done[index].first_s, ran.done[index].last_s) for index in sorted(ran.done)]


SIMULATORS = pytest.mark.parametrize("run", [fast, real], ids=["replayed", "sim"])


@SIMULATORS
def test_kv_moves_one_request_after_another_and_the_answers_share_steps(run: Callable[..., Ran]) -> None:
    # Prompts end at 0.1, 0.145, 0.18; KV is there at 0.2, 0.245, 0.275 (1000 tokens/s).
    # The second joins the first's step of 0.25: two rows take 20 ms.  The third joins at 0.29.
    found = run(requests((0.0, 100, 8), (0.05, 45, 3), (0.15, 30, 2)), prefill(bytes_per_s=1000.0))
    assert stamps(found) == [pytest.approx(one) for one in ((0.1, 0.29), (0.145, 0.29), (0.18, 0.30))]
    assert (found.num_moved, found.num_failed) == (3, 0)


@SIMULATORS
def test_the_kv_of_two_senders_reaches_one_instance_in_turn(run: Callable[..., Ran]) -> None:
    # Prompts end at 0.1 and 0.08.  The second's KV (1000 tokens/s) is there at 0.16, the first's at 0.26.
    asked = requests((0.0, 100, 2), (0.0, 80, 2))
    found = run(asked, prefill(2, bytes_per_s=1000.0), num_instances=3)
    assert stamps(found) == [pytest.approx(one) for one in ((0.1, 0.27), (0.08, 0.17))]


@SIMULATORS
def test_a_busy_target_admits_between_steps_and_decodes_one_step_later(run: Callable[..., Ran]) -> None:
    # First: prompt to 0.01, then steps of 10 ms.  Second: prompt to 0.0175, admitted at 0.02, decoded in the
    # step of two rows from 0.03 to 0.05.
    found = run(requests((0.0, 10, 20), (0.0125, 5, 2)), prefill())
    assert found.done[1].first_s == pytest.approx(0.0175)
    assert found.done[1].last_s == pytest.approx(0.05)
    assert found.done[0].last_s == pytest.approx(0.01 + 19 * 0.01 + 0.01)


@SIMULATORS
def test_a_full_target_returns_the_answer_and_prompts_wait_for_their_instance(
    run: Callable[..., Ran],
) -> None:
    # The first decodes until 7.01 in the target's only seat.  The second has its first token at 0.11, and
    # goes on at 5.11 where it began.  The third waits for that seat, until 5.13.
    found = run(requests((0.0, 10, 701), (0.1, 10, 3), (0.2, 10, 1)), prefill(), max_num_seqs=1)
    assert stamps(found) == [pytest.approx(one) for one in ((0.01, 7.01), (0.11, 5.13), (5.14, 5.14))]
    assert (found.num_moved, found.num_failed) == (1, 1)


@SIMULATORS
def test_an_answer_that_goes_on_where_it_began_moves_once_there_is_a_seat(run: Callable[..., Ran]) -> None:
    # The first decodes until 6.02 in the target's only seat.  The second's first token comes at 0.1135, and
    # its answer goes on at 5.1135.  From 6.0235 to 6.1245 the KV of the prompt and of 91 more tokens leaves
    # (1000 tokens/s); eight tokens are left.  The third waits for the seat until then.
    asked = requests((0.0, 10, 601), (0.1035, 10, 100), (0.2, 10, 1))
    found = run(asked, prefill(bytes_per_s=1000.0), max_num_seqs=1)
    expected = ((0.01, 6.02), (0.1135, 6.2045), (6.1345, 6.1345))
    assert stamps(found) == [pytest.approx(one) for one in expected]
    assert (found.num_moved, found.num_failed) == (2, 1)


@SIMULATORS
def test_a_second_failed_move_leaves_the_answer_where_it_began(run: Callable[..., Ran]) -> None:
    # The target's only seat is in use until 40.01: the moves end at 5.11 and 35.11.
    found = run(requests((0.0, 10, 4001), (0.1, 10, 3600)), prefill(), max_num_seqs=1)
    assert stamps(found) == [pytest.approx(one) for one in ((0.01, 40.01), (0.11, 5.11 + 35.99))]
    assert (found.num_moved, found.num_failed) == (1, 2)


@SIMULATORS
def test_second_moves_wait_for_places(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    # With one place the second answer's move ends at 35.11, and the third's waits from then to 40.01.
    monkeypatch.setattr(prefill_first, "RETRIES_AT_ONCE", 1)
    asked = requests((0.0, 10, 4001), (0.1, 10, 5000), (0.1, 10, 5000))
    found = run(asked, prefill(2), num_instances=3, max_num_seqs=1)
    assert (found.num_moved, found.num_failed) == (2, 3)


@SIMULATORS
def test_kv_of_a_step_leaves_beside_later_steps(run: Callable[..., Ran]) -> None:
    # Steps of 100, 100 and 50 tokens end at 0.1, 0.2 and 0.25.  KV (1000 tokens/s) leaves from 0.1 to 0.3,
    # the last step's to 0.35.
    found = run(requests((0.0, 250, 2)), prefill(bytes_per_s=1000.0), max_num_batched_tokens=100)
    assert stamps(found) == [pytest.approx((0.25, 0.36))]
    assert (found.num_moved, found.num_failed) == (1, 0)


@SIMULATORS
def test_early_kv_waits_for_the_link_as_other_kv_does(run: Callable[..., Ran]) -> None:
    # From 0.01 on: 60 tokens of the second prompt with 40 of the third, then its last 30, to 0.11 and 0.14.
    # The second's KV leaves until 0.17, the third's 40 tokens until 0.21, its 30 until 0.24.
    asked = requests((0.0, 10, 1), (0.002, 60, 2), (0.004, 70, 2))
    found = run(asked, prefill(bytes_per_s=1000.0), max_num_batched_tokens=100)
    assert stamps(found) == [pytest.approx(one) for one in ((0.01, 0.01), (0.11, 0.18), (0.14, 0.25))]


@SIMULATORS
def test_a_target_without_a_seat_to_spare_has_no_unfinished_prompt(run: Callable[..., Ran]) -> None:
    # The first answers until 0.23, in one of two seats.  The second's 150 tokens end at 0.165; the target
    # admits it between steps, at 0.17, and all of its KV leaves then, until 0.32.
    asked = requests((0.0, 10, 22), (0.015, 150, 2))
    found = run(asked, prefill(bytes_per_s=1000.0), max_num_batched_tokens=100, max_num_seqs=2)
    assert stamps(found) == [pytest.approx(one) for one in ((0.01, 0.23), (0.165, 0.33))]


@SIMULATORS
def test_kv_waits_for_the_adapters_lease_at_the_lora_server(run: Callable[..., Ran]) -> None:
    # The prompt's instance has the adapter.  Steps of 100 and 50 tokens end at 0.11 and 0.16; the lease comes
    # at 0.13, so KV leaves from 0.13 to 0.28.
    asked = requests((0.01, 150, 2), adapter="a")
    found = run(asked, prefill(bytes_per_s=1000.0), lease_s=0.02, max_num_batched_tokens=100)
    assert stamps(found) == [pytest.approx((0.16, 0.29))]
    assert (found.num_moved, found.num_failed) == (1, 0)


@SIMULATORS
def test_an_answer_of_one_token_does_not_move(run: Callable[..., Ran]) -> None:
    found = run(requests((0.0, 20, 1)), prefill())
    assert stamps(found) == [pytest.approx((0.02, 0.02))]
    assert found.num_moved == 0


@SIMULATORS
@pytest.mark.parametrize("busy", [0.5, 0.8])
def test_prompts_wait_as_in_an_m_d_1_queue(run: Callable[..., Ran], busy: float) -> None:
    """Steps of one prompt of 100 ms: mean wait rho D / (2 (1 - rho))."""
    number, service_s = 3000, 0.1
    arrivals = np.cumsum(np.random.default_rng(1).exponential(service_s / busy, number))
    asked = requests(*((at, 100, 2) for at in arrivals.tolist()))
    found = run(asked, prefill(), max_num_batched_tokens=100)
    waits = [found.done[one.index].first_s - one.arrival_s - service_s for one in asked]
    # Lindley's recursion is exact for these arrivals; the formula is its mean over all arrivals.
    exact, free_s = [], 0.0
    for at in arrivals.tolist():
        start_s = max(at, free_s)
        exact.append(start_s - at)
        free_s = start_s + service_s
    assert waits == pytest.approx(exact, abs=1e-9)
    assert np.mean(waits) == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=0.15)
    assert found.num_moved == number


def drawn(seed: int, number: int = 60) -> list[PlannedRequest]:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(0.05, number)).tolist()
    return [
        PlannedRequest(
            index, at_s[index], f"a{rng.integers(3)}", int(rng.integers(4, 90)), int(rng.integers(1, 60))
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bytes_per_s", [50.0, AT_ONCE])
@pytest.mark.parametrize(
    "run",
    [
        partial(fast, kv_tokens=400, max_num_seqs=6, max_num_batched_tokens=40),
        partial(real, num_device_pages=28, max_num_seqs=6, max_num_batched_tokens=40),
        partial(fast, lease_s=0.02, kv_tokens=400, max_num_seqs=6, max_num_batched_tokens=40),
        partial(real, lease_s=0.02, num_device_pages=28, max_num_seqs=6, max_num_batched_tokens=40),
    ],
    ids=["replayed", "sim", "replayed beside a server", "sim beside a server"],
)
def test_each_request_ends_once_and_nothing_is_held_afterwards(
    run: Callable[..., Ran], bytes_per_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little KV: instances preempt, and some moves fail; with the last seed most do."""
    if seed == 2:
        monkeypatch.setattr(prefill_first, "MOVE_READY_S", 0.03)
        monkeypatch.setattr(prefill_first, "RETRY_READY_S", 0.15)
    asked = drawn(seed)
    found = run(asked, prefill(2, bytes_per_s), num_instances=5)
    assert sorted(found.done) == list(range(len(asked)))
    assert found.num_moved > 0
    for instance in found.cluster.instances:
        assert instance.outstanding_tokens == 0
        assert not instance.load.num_requests
        assert not instance.load.waiting_tokens


def test_the_limits_of_moves_are_the_front_ends() -> None:
    assert (MOVE_READY_S, RETRY_READY_S, RETRIES_AT_ONCE) == (ACK_S, READY_S, MOVES_AT_ONCE)


@pytest.mark.parametrize("number", [0, 2])
@SIMULATORS
def test_both_kinds_of_instances_are_needed(run: Callable[..., Ran], number: int) -> None:
    with pytest.raises(ConfigError, match=f"{number} of 2 instances compute prompts; choose 1 to 1"):
        run(requests((0.0, 1, 1)), prefill(number))


def test_other_moves_are_refused_and_a_server_needs_prompt_instances() -> None:
    layers, local = InstanceConfig(layers=Layers()), LocalConfig(capacity=1)
    common: dict[str, Any] = {"num_instances": 2, "prefill": prefill()}
    own = PromptInstances(instance=layers, adapters=local)
    for more in ({"adapters": server(1)}, {"adapters": local, "prompts": own}):
        with pytest.raises(ConfigError, match="beside a LoRA Server, and only there"):
            SystemConfig(instance=layers, **common, **more)
    placed = PlacementConfig(planner=lambda: lambda tokens, seconds: {})
    with pytest.raises(ConfigError, match="without placement"):
        SystemConfig(instance=layers, adapters=local, placement=placed, **common)
    with pytest.raises(ConfigError, match="another device computes the prompts"):
        SystemConfig(instance=InstanceConfig(profile=flat_profile()), adapters=local, **common)
    cached = CachedConfig(
        time=TIME,
        adapter_pages={},
        num_device_pages=8,
        num_host_pages=0,
        link_bytes_per_s=1.0,
        layers=Layers().layer_s,
    )
    settings: dict[str, Any] = {"num_replicas": 2, "instance": cached, "router": LeastOutstanding}
    settings |= {"caching": lambda: make_caching_policy("lru", cached.costs()), "prefill": prefill()}
    with pytest.raises(ConfigError, match="prefill has moves of its own"):
        ReplicasConfig(migration=SimMigration(), **settings)
    with pytest.raises(ConfigError, match="beside a LoRA Server, and only there"):
        ReplicasConfig(server=SimServerConfig(capacity=1, num_layers=1, layer_load_s=0.0), **settings)
