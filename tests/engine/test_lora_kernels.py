# SPDX-License-Identifier: Apache-2.0
"""Whichever LoRA kernel an engine or a LoRA Server is told to use, answers are the same on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.tasks import prompt_for
from moe_lora import LLM, SamplingParams
from moe_lora.kernels.cpu.cpu import KERNELS
from moe_lora.lora import local

DEMO = Path(__file__).parents[2] / "demo"
NAMES = [None, *list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:4]]
PROMPTS = [prompt_for("abcdefgh"[: 3 + i]) for i in range(len(NAMES))]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answers(kernel: str) -> list[tuple[int, ...]]:
    adapters = {name: str(DEMO / "adapters" / name) for name in NAMES if name}
    settings = {"dtype": "float32", "num_threads": 1, "eager": True, "lora_kernel": kernel}
    with LLM(str(DEMO / "model"), adapters=adapters, **settings) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, NAMES, SAMPLING)]


@pytest.fixture(scope="module")
def of_sgmv() -> list[tuple[int, ...]]:
    return answers("sgmv")


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv"])
def test_baselines_give_the_tokens_of_sgmv(of_sgmv, kernel, monkeypatch):
    used, made = set(), local.lora_rows

    def spy(*operands):
        rows = made(*operands)
        used.add(rows.table.kernel)
        return rows

    monkeypatch.setattr(local, "lora_rows", spy)
    assert answers(kernel) == of_sgmv
    assert used == {KERNELS[kernel]}
