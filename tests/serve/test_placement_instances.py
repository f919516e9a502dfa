# SPDX-License-Identifier: Apache-2.0
"""Real instances whose adapters are placed anew all the time."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.tasks import prompt_for

from .demo_server import DEMO, DemoServer, demo_server

ADAPTERS = list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:6]
OPTIONS = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--instances", "2", "--dtype", "float32")
PLACED = ("--placement", "loraserve", "--set", "front_end.placement_interval_s=0.2")


def metric(server: DemoServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return next(sample.value for sample in samples if sample.name == f"moe_lora:placement_{name}")


def complete_all(server: DemoServer, models: list[str]) -> list[str]:
    async def one(http: httpx.AsyncClient, model: str) -> str:
        body = {"model": model, "prompt": prompt_for("abcxyz"), "max_tokens": 12, "min_tokens": 12}
        response = await http.post("/v1/completions", json={**body, "temperature": 0})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            return await asyncio.gather(*(one(http, model) for model in models))

    return asyncio.run(run())


@pytest.mark.slow
def test_answers_are_the_same_and_none_fails_while_tables_change(tmp_path):
    with demo_server(tmp_path / "log", *OPTIONS, *PLACED) as server:
        alone = dict(zip(ADAPTERS, complete_all(server, ADAPTERS), strict=True))
        tables = metric(server, "tables_total")
        for round_number in range(200):  # the demand shifts from the first adapters to the last
            models = [ADAPTERS[min(5, (round_number + place) // 2)] for place in range(6)] * 2
            models += ADAPTERS
            assert complete_all(server, models) == [alone[model] for model in models]
            if round_number >= 8 and metric(server, "tables_total") >= tables + 3:
                break
        assert metric(server, "tables_total") >= tables + 3
        assert metric(server, "moves_total") >= 1
        assert metric(server, "problems_total") == 0
