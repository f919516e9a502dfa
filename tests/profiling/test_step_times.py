# SPDX-License-Identifier: Apache-2.0
"""A real engine with random adapters: steps that are timed, requests that are sent at their times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_lora.config import EngineConfig
from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from moe_lora.profiling.step_times import OverloadError, StepClock, random_adapter, serve_open_loop
from moe_lora.timing.step_model import Row
from moe_lora.workload.replay_plan import PlannedRequest

MODEL = Path(__file__).parents[2] / "demo" / "model"
RANKS = {"low": 4, "high": 32}


@pytest.fixture(scope="module")
def clock() -> Iterator[StepClock]:
    config = EngineConfig(
        model_dir=str(MODEL),
        num_threads=1,
        eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=24,
        prefix_caching=False,
    )
    clock = StepClock(config, RANKS, num_decode_steps=3)
    yield clock
    clock.close()


def test_every_step_of_a_batch_is_timed(clock: StepClock) -> None:
    before = clock.core.stats()
    prefill_s, decode_s = clock.run([Row("low", 4, 5), Row("high", 32, 3), Row(None, 0, 1)])
    after = clock.core.stats()
    assert prefill_s > 0
    assert len(decode_s) == 3
    assert min(decode_s) > 0
    assert after.num_steps - before.num_steps == 4
    assert after.generation_tokens - before.generation_tokens == 4 * 3
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert set(after.resident_adapters) == set(RANKS)


def test_a_batch_beyond_one_step_is_refused_and_dropped(clock: StepClock) -> None:
    with pytest.raises(CapacityError, match="1 of 2 requests started together"):
        clock.run([Row("low", 4, 12), Row("low", 4, 8)])
    assert not clock.core.has_work


def test_share_of_experts_is_the_models(clock: StepClock) -> None:
    shape = shape_of(read_config(MODEL))
    assert clock.expert_share == shape.num_experts_per_token / shape.num_experts


def test_processor_time_of_several_threads_is_refused() -> None:
    config = EngineConfig(model_dir=str(MODEL), device="cpu", num_threads=2)
    with pytest.raises(ConfigError, match="leave out --processor-time"):
        StepClock(config, {}, 1, processor_time=True)


def test_open_loop_serves_every_request_in_full(clock: StepClock) -> None:
    plan = [PlannedRequest(i, 0.002 * i, ("low", "high", None)[i % 3], 4, 5) for i in range(9)]
    served = serve_open_loop(clock.core, plan, longest_wait_s=math.inf)
    assert [one.arrival_s for one in served] == [one.arrival_s for one in plan]
    assert all(one.arrival_s < one.first_token_s < one.finish_s for one in served)
    assert not clock.core.has_work


def test_open_loop_sends_nothing_early(clock: StepClock) -> None:
    now = 0.0

    def passing() -> float:
        nonlocal now
        now += 0.01
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    plan = [PlannedRequest(i, float(i), "low", 4, 2) for i in range(3)]
    served = serve_open_loop(clock.core, plan, longest_wait_s=math.inf, now_s=passing, sleep=sleep)
    assert all(one.first_token_s >= one.arrival_s for one in served)
    assert served[2].first_token_s < 2.5


def test_open_loop_stops_when_requests_wait_too_long(clock: StepClock) -> None:
    plan = [PlannedRequest(i, 0.0, "low", 4, 12) for i in range(12)]
    with pytest.raises(OverloadError) as caught:
        serve_open_loop(clock.core, plan, longest_wait_s=0.0)
    assert caught.value.waited_s > 0
    assert not clock.core.has_work


@pytest.mark.parametrize("lora_rank", [1, 7, 16])
def test_random_adapter_is_what_its_shape_says(lora_rank: int) -> None:
    shape = shape_of(read_config(MODEL))
    packed = random_adapter(shape, torch.bfloat16, "x", lora_rank, seed=0)
    assert packed.max_lora_rank == lora_rank
    assert packed.nbytes == shape.adapter_bytes(lora_rank) * 2 // shape.dtype_bytes
    other = random_adapter(shape, torch.bfloat16, "x", lora_rank, seed=1)
    assert other.content_hash != packed.content_hash


def test_an_adapter_of_no_rank_is_refused() -> None:
    shape = shape_of(read_config(MODEL))
    with pytest.raises(ConfigError, match="lora_rank=0 must be 1 or more"):
        random_adapter(shape, torch.float32, "x", 0, seed=0)


def test_the_rank_of_a_random_adapter_has_no_upper_limit() -> None:
    shape = shape_of(read_config(MODEL))
    assert random_adapter(shape, torch.float32, "x", 513, seed=0).max_lora_rank == 513
