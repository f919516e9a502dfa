# SPDX-License-Identifier: Apache-2.0
"""A server whose file has instances for prompts and a LoRA Server, as `moe-lora provision` writes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S

from .demo_server import DEMO, demo_server
from .test_layout_change import ADAPTERS, NUM_QUESTIONS, answer, change, right  # noqa: F401  (the fixture)

FILE = f"""
model_dir: {DEMO / "model"}
engine: {{eager: true, dtype: float32, num_instances: 2, arena_mb: 40, max_loras: 2}}
lora_server: {{layout: EP1-PP1, capacity: 4, memory_gb: 0.05}}
front_end: {{prefill_instances: [instance-0]}}
fixed: {{front_end: {{check_timeout_s: {PATIENCE_S}}}}}
"""


@pytest.mark.slow
def test_answers_are_right_and_a_layout_change_leaves_instances_for_prompts(
    tmp_path: Path,
    right: dict[int, tuple[int, ...]],  # noqa: F811
) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    adapters = [f"{name}={DEMO / 'adapters' / name}" for name in ADAPTERS]

    async def ask(url: str) -> tuple[dict, str]:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
            for number in range(NUM_QUESTIONS):
                assert await answer(http, number) == right[number]
            await change(http, "EP2-PP1")
            for number in range(NUM_QUESTIONS):
                assert await answer(http, number) == right[number]
            state = (await http.get("/v1/lora_server")).json()
            return state, (await http.get("/metrics")).text

    with demo_server(
        tmp_path / "log", "--config", str(tmp_path / "cluster.yaml"), "--lora-modules", *adapters
    ) as server:
        processes = server.engine_pids()
        state, metrics = asyncio.run(ask(server.url))
        assert server.engine_pids() == processes, "no instance started again"
    assert state["num_instances"] == 1
    moves = [line for line in metrics.splitlines() if line.startswith("moe_lora:migrations_total")]
    assert sum(float(line.split()[-1]) for line in moves) > 0
