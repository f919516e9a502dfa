# SPDX-License-Identifier: Apache-2.0
"""The emulated device's clock: which stages add up, and which overlap.  Sleeps are recorded, not slept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.kernels.operands import StepTables
from moe_lora.lora import paced
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.paced import PacedBackend, prefill_shares
from moe_lora.lora.row_routing import Source, local_routing
from tests.dist.lora_server.shapes import model_shape

SHAPE = model_shape()
GATE_UP, DOWN = (i for i, site in enumerate(SHAPE.sites) if site.num_experts)
PROFILE = StepProfile(
    attention=StageTime(fixed_s=1.0),
    experts=StageTime(fixed_s=30.0),
    lora=StageTime(fixed_s=6.0),
    transfer=StageTime(fixed_s=3.0),
)


class Clock:
    """Stands in for the time module: sleeping moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Answering(LoraBackend):
    """A backend whose answers are there `delay_s` after they are waited for."""

    def __init__(self, clock: Clock, delay_s: float) -> None:
        self.clock, self.delay_s = clock, delay_s

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo:
        return self.add_to

    def add_to(self, y: torch.Tensor) -> None:
        self.clock.now_s += self.delay_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    return clock


def layer_s(
    clock: Clock,
    profile: StepProfile,
    *,
    remote: bool,
    delay_s: float = 0.0,
    query_len: int = 1,
    lora: bool = True,
) -> float:
    backend = PacedBackend(Answering(clock, delay_s), SHAPE, profile, remote=remote)
    start_s = clock.now_s
    backend.begin_step(
        StepTables(
            query_start=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens=torch.tensor([8], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
        ),
        local_routing(SHAPE, np.full(query_len, 0 if lora else -1, dtype=np.int32)),
    )
    for site in range(len(SHAPE.sites)):
        backend.begin(0, site, torch.zeros(1), None)(torch.zeros(1))
    # Dense sites wait for the answering backend too, which is not the device's time.
    return clock.now_s - start_s - delay_s * (len(SHAPE.sites) - 2)


def test_local_deltas_come_after_the_base_gemm(clock: Clock) -> None:
    assert layer_s(clock, PROFILE, remote=False) == pytest.approx(1 + 30 + 6)


def test_rows_without_adapters_take_no_lora_time(clock: Clock) -> None:
    assert layer_s(clock, PROFILE, remote=False, lora=False) == pytest.approx(1 + 30)


def test_prefill_rows_are_another_devices(clock: Clock) -> None:
    assert layer_s(clock, PROFILE, remote=False, query_len=4) == 0.0


def test_prompt_rows_take_a_layers_time_by_the_work_of_its_sites(clock: Clock) -> None:
    profile = StepProfile(prefill=StageTime(fixed_s=2.0, per_row_s=3.0))
    assert layer_s(clock, profile, remote=False, query_len=4) == pytest.approx(2 + 3 * 4)
    shares = prefill_shares(SHAPE)
    work = [site.in_features * site.total_out_features for site in SHAPE.sites]
    assert shares[DOWN] / shares[0] == pytest.approx(SHAPE.num_experts_per_token * work[DOWN] / work[0])


@pytest.mark.parametrize(("delay_s", "late_s"), [(0.25, 0.0), (30.0, 27.0)])
def test_a_host_that_is_late_holds_a_prompt_up(clock: Clock, delay_s: float, late_s: float) -> None:
    profile = StepProfile(prefill=StageTime(fixed_s=3.0 * len(SHAPE.sites)))
    backend = PacedBackend(Answering(clock, delay_s), SHAPE, profile, remote=False)
    backend._prefill_shares = [1 / len(SHAPE.sites)] * len(SHAPE.sites)
    routing = local_routing(SHAPE, np.zeros(4, dtype=np.int32))
    routing.terms["source"][0] = Source.HOST
    lengths = {"query_start": [0, 4], "seq_lens": [8], "block_tables": [[0]]}
    step = StepTables(**{name: torch.tensor(v, dtype=torch.int32) for name, v in lengths.items()})
    start_s = clock.now_s
    backend.begin_step(step, routing)
    for site in range(len(SHAPE.sites)):
        backend.begin(0, site, torch.zeros(1), None)(torch.zeros(1))
    assert clock.now_s - start_s == pytest.approx((3.0 + late_s) * len(SHAPE.sites))


def test_remote_deltas_hide_behind_the_base_gemm(clock: Clock) -> None:
    assert layer_s(clock, PROFILE, remote=True) == pytest.approx(1 + 30)


def test_without_overlap_the_remote_call_adds_up(clock: Clock) -> None:
    profile = StepProfile(**{**vars(PROFILE), "overlap": False})
    assert layer_s(clock, profile, remote=True) == pytest.approx(1 + 30 + 3)


def test_late_answer_holds_the_layer_up(clock: Clock) -> None:
    profile = StepProfile(**{**vars(PROFILE), "attention": StageTime()})
    # Three dense sites wait before the first expert site: their 40 s each use up its base time.
    late_s = layer_s(clock, profile, remote=True, delay_s=40.0)
    assert late_s == pytest.approx(2 * 40 + 3)
