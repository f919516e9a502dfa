# SPDX-License-Identifier: Apache-2.0
"""How many kernels a layer of a decode step launches on CUDA: the package's own, seen on a stand-in for it.

(Started by `tests/kernels/triton/test_in_interpreter.py`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.kernels.triton.linear import experts
from tests.models.harness import Harness
from tests.stand_in_device import Launch, launches, stand_in_device

from .on_device import FAMILIES, QUICK, OnDevice, checkpoint_and_adapter

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
FOR_LORA = dict.fromkeys(("llama", "mixtral", "qwen3_moe", "gpt_oss", "dbrx"), 8)
"""Launches of a layer by which a step with adapters exceeds one without; two for each of four sites."""
OF_BASE = {"llama": 2, "mixtral": 5, "qwen3_moe": 5, "gpt_oss": 5, "dbrx": 5}
"""The package's other launches of a layer.  What the compiler makes of torch's operations comes to it."""
OF_THE_COMPILER = {"norm_rows", "sum_experts"}
"""Of steps that are not compiled: in those that are, the compiler has them in the kernels that it makes."""
ONCE_A_STEP = {"zeros"}
"""Counters of all layers, for the launches of LoRA and for the others."""


def launches_of_a_layer(harness: Harness, slots: tuple[int, ...]) -> list[Launch]:
    """Of a decode step of rows of these adapters, from one layer's attention to the next one's."""
    device = OnDevice(harness, [(slot, [7]) for slot in slots])
    with launches() as noted:
        device.step()
    counted = Counter(one.name for one in noted if one.operation)
    assert all(counted[name] <= 2 for name in ONCE_A_STEP)
    ours = [one for one in noted if one.operation and one.name not in OF_THE_COMPILER | ONCE_A_STEP]
    first, second = (i for i, one in enumerate(ours) if one.name == "write_kv")
    return ours[first:second]


@contextmanager
def codes() -> Iterator[set[tuple[str, frozenset[Any]]]]:
    """Kernels that are launched in the context, each with its constants; none runs."""
    found = set()

    def note(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
        found.add((kernel.__name__, frozenset(meta.items())))

    with patch.object(configs, "start", note):
        yield found


def test_prompts_meet_no_code_that_was_not_run_before_the_first(tmp_path, monkeypatch):
    max_tokens = 31
    monkeypatch.setattr(experts, "ONE_LAUNCH_MAX_ROWS", 8)
    harness = Harness(*checkpoint_and_adapter(QUICK, tmp_path), dtype=torch.bfloat16, max_sequences=8)
    prompts = [(0, [3, 5]), (-1, [11, 13, 17]), (0, [7] * (max_tokens - 3)), (-1, [7] * 3)]
    with stand_in_device():
        device = OnDevice(harness, prompts)
        ranks = harness.slots.site_ranks(np.array([0]), harness.model.spec.shape.sites)
        with codes() as before:
            device.runner.warm_up(ranks, max_tokens)
        with codes() as met:
            for turn in (slice(0, 2), slice(2, 4)):
                device.step(turn)
    assert {"attend", "expert_linear", "wgmma_shrink", "wgmma_expand"} <= {kernel for kernel, _ in met}
    assert met <= before
    assert {dict(constants)["BLOCK_T"] for kernel, constants in met if kernel == "expert_linear"} == {16, 32}


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == QUICK else pytest.mark.slow) for one in FAMILIES]
)
def test_a_layer_launches_as_many_as_the_docs_say(family, tmp_path):
    harness = Harness(*checkpoint_and_adapter(family, tmp_path), dtype=torch.bfloat16, max_sequences=8)
    with stand_in_device():
        base = launches_of_a_layer(harness, (-1, -1))
        lora = launches_of_a_layer(harness, (0, -1, 0))
    assert Counter(one.name for one in base)["attend"] == 1
    assert any(one.name == "wgmma_expand" for one in lora)
    for_lora = Counter(one.name for one in lora) - Counter(one.name for one in base)
    assert for_lora.total() == FOR_LORA[family], for_lora
    assert len(base) == OF_BASE[family], Counter(one.name for one in base)
