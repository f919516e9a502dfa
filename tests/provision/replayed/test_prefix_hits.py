# SPDX-License-Identifier: Apache-2.0
"""Prefixes that a simulated instance has KV of, by hand."""

from __future__ import annotations

import pytest

from moe_lora.config.optional_parts import StageTime
from moe_lora.provision.replayed.running import SimRequest
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import BlockHits, StatedHits
from moe_lora.workload.replay_plan import PlannedRequest
from tests.sim.systems import STEP_S, coupled


def prompt(*blocks: int, adapter: str = "a", tokens: int | None = None) -> SimRequest:
    return SimRequest(0, 0.0, adapter, 10 * len(blocks) if tokens is None else tokens, 1, hash_ids=blocks)


def test_only_leading_blocks_of_the_same_adapter_are_found() -> None:
    hits = BlockHits(10)
    hits.add(prompt(1, 2, 3), 100)
    assert hits.match(prompt(1, 2, 9, 3)) == 20
    assert hits.match(prompt(9, 1, 2)) == 0
    assert hits.match(prompt(1, 2, 3, adapter="b")) == 0


def test_one_token_of_a_prompt_is_always_computed() -> None:
    hits = BlockHits(10)
    hits.add(prompt(1, 2), 100)
    assert hits.match(prompt(1, 2)) == 19
    assert hits.match(prompt(1, 2, tokens=15)) == 14
    assert StatedHits(share=0.99).match(prompt(1, tokens=1)) == 0


def test_last_blocks_leave_first_and_only_free_kv_is_used() -> None:
    hits = BlockHits(10)
    hits.add(prompt(1, 2, 3), 20)
    assert hits.match(prompt(1, 2, 3, 4)) == 20
    hits.add(prompt(7), 20)
    assert (hits.match(prompt(7, 8)), hits.match(prompt(1, 2))) == (10, 10)
    hits.add(prompt(8), 5)
    assert hits.match(prompt(7, 8, 9)) == 0


@pytest.mark.parametrize(("make", "computed"), [(None, 20), (lambda: StatedHits(share=0.5), 10)])
def test_a_hit_shortens_the_prompt_and_no_work_is_forgotten(make, computed) -> None:
    config = coupled(1, prefill=StageTime(per_row_s=0.01), prefix_hits=make)
    (request,) = simulate(config, [PlannedRequest(0, 0.0, "a", 20, 2)]).requests
    assert request.first_token_s == pytest.approx(computed * 0.01)
    assert request.finish_s == pytest.approx(computed * 0.01 + STEP_S)


def test_the_second_turn_finds_the_first_ones_prompt() -> None:
    config = coupled(1, prefill=StageTime(per_row_s=0.01), prefix_hits=lambda: BlockHits(10))
    turns = [
        PlannedRequest(0, 0.0, "a", 20, 1, hash_ids=(1, 2)),
        PlannedRequest(1, 5.0, "a", 30, 1, hash_ids=(1, 2, 3)),
    ]
    system = simulate(config, turns)
    assert [request.ttft_s for request in system.requests] == pytest.approx([0.2, 0.1])
    assert [one.outstanding_tokens for one in system.instances] == [0]
