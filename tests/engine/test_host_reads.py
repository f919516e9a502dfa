# SPDX-License-Identifier: Apache-2.0
"""The host reads nothing from the device in a step: whole steps of each family on a stand-in for CUDA.

The package's own CUDA paths run, their kernels in Triton's interpreter (started by
`tests/kernels/triton/test_in_interpreter.py`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lora.kernels import ops
from moe_lora.kernels.triton.configs import interpreted
from tests.families import later
from tests.models.harness import Harness
from tests.stand_in_device import DeviceTensor, HostRead, stand_in_device

from .on_device import FAMILIES, PROMPTS, QUICK, OnDevice, checkpoint_and_adapter

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """family -> its tiny checkpoint and one adapter on all of its sites."""

    @cache
    def make(family: str) -> tuple[Path, list[Path]]:
        return checkpoint_and_adapter(family, tmp_path_factory.mktemp(family))

    return make


def expected_logits(harness: Harness) -> list[torch.Tensor]:
    """Of the last rows of both steps, by the CPU library."""
    streams = [harness.add(slot) for slot, _ in PROMPTS]
    steps = [[tokens for _, tokens in PROMPTS], [[29] for _ in PROMPTS]]
    return [
        torch.stack([rows[-1] for rows in harness.step(list(zip(streams, step, strict=True)))])
        for step in steps
    ]


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(one, marks=() if one == QUICK else pytest.mark.slow) for one in FAMILIES),
        *later(),
    ],
)
def test_a_step_reads_nothing_from_the_device(family, served):
    harness = Harness(*served(family), max_sequences=6)
    expected = expected_logits(harness)
    with stand_in_device():
        device = OnDevice(harness)
        found = [device.step(), device.step(drawn=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def plant(operation, monkeypatch) -> list[str]:
    """Have the operation read a number of its first tensor on the device; what was read so far."""
    schema = next(one for one in ops._OPS if one.startswith(f"{operation}("))
    does, fake = ops._OPS[schema]
    reads = []

    def planted(*operands):
        device = next(one for one in operands if isinstance(one, DeviceTensor))
        reads.append(operation)
        device.flatten()[0].item()
        return does(*operands)

    monkeypatch.setitem(ops._OPS, schema, (planted, fake))
    return reads


OPERATIONS = [schema.partition("(")[0] for schema in ops._OPS]
ELSEWHERE = {
    "lora_linear",
    "exchange_experts",
    "sum_over_ranks",
    "gather_logits",
    "linear",
    "paged_attention",
    "delta_rule",
    "quantised_linear",
}
"""In steps of several ranks, on the CPU, and of quantised weights."""


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(one, marks=() if one in ("lora_add_to", "rotary_attention") else pytest.mark.slow)
        for one in OPERATIONS
        if one not in ELSEWHERE
    ],
)
def test_a_read_planted_behind_an_operation_of_the_step_is_caught(operation, served, monkeypatch):
    reads = plant(operation, monkeypatch)
    with stand_in_device(), pytest.raises(HostRead):
        OnDevice(Harness(*served(QUICK), max_sequences=4)).step()
    assert reads == [operation]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_read_planted_behind_an_operation_is_caught(operation, monkeypatch):
    reads = plant(operation, monkeypatch)
    called = getattr(torch.ops.moe_lora, operation)
    given = {"Tensor": DeviceTensor(torch.zeros(2, 2)), "int": 1, "float": 1.0, "bool": False, "str": ""}
    given["List[float]"] = [1.0]
    operands = [given.get(str(one.type)) for one in called.default._schema.arguments]
    with stand_in_device(), pytest.raises(HostRead):
        called(*operands)
    assert reads == [operation]


def test_the_stand_in_knows_every_way_to_read() -> None:
    ways = [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0])],
        lambda x: x.__setitem__(0, torch.ones(())),
        lambda x: torch.where(x > 1),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x.masked_select(x > 1),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.copy_(torch.zeros(3).pin_memory()),
        lambda x: x + torch.zeros(3),
        lambda x: torch.zeros(3).to(x.device, non_blocking=True),
        lambda x: torch.zeros(3).pin_memory().to(x.device),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x.repeat_interleave(x.long()),
    ]
    with stand_in_device(), torch.inference_mode():
        x = DeviceTensor(torch.arange(3.0))
        for number, read in enumerate(ways):
            with pytest.raises(HostRead):
                assert read(x) is number, f"way {number} was not seen"
        y = torch.zeros(3, pin_memory=True)
        x.copy_(y, non_blocking=True)
        assert y.to(x.device, non_blocking=True).is_cuda
        assert (x[1:] + x.new_ones(2)).held.tolist() == [1.0, 1.0]
        assert np.isfinite(x.held.numpy()).all()
