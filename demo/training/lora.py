# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the demo model: their factors, their place in the weights, their training.

Legend: R LoRA rank, D hidden, F expert hidden, E experts.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import share_exact
from .data import make_batch
from .model import SHAPE, Weights, forward

ATTENTION = ("q", "k", "v", "o")
_BATCH_QUESTIONS = 64
_REPORT_EVERY = 50
_WARMUP_STEPS = 20
_PEAK_LR = 5e-3


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """One adapter to train. form: how its expert matrices are stored.

    fused: gate and up share one A (PEFT `target_parameters`); per_expert: w1, w2, w3 of each
    expert are LoRA modules of their own (older PEFT files).
    """

    name: str
    task: str
    lora_rank: int
    num_steps: int
    form: Literal["fused", "per_expert"] = "fused"

    @property
    def alpha(self) -> int:
        """LoRA alpha; the delta is scaled by alpha / lora_rank."""
        return 2 * self.lora_rank


def _sites(plan: AdapterPlan) -> tuple[str, ...]:
    experts = ("gate_up", "down") if plan.form == "fused" else ("w1", "w3", "w2")
    return ATTENTION + experts


def _site_shape(base: Weights, n: int, site: str) -> torch.Size:
    if site in ("w1", "w3"):
        num_experts, doubled, hidden = base[f"{n}.gate_up"].shape
        return torch.Size((num_experts, doubled // 2, hidden))
    return base[f"{n}.{'down' if site == 'w2' else site}"].shape


def initial_adapter(base: Weights, plan: AdapterPlan, seed: int) -> Weights:
    """Factors `{layer}.{site}.a` [(E,) R, in] random and `.b` [(E,) out, R] zero: a delta of nothing."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for n in range(SHAPE.num_layers):
        for site in _sites(plan):
            *experts, size_out, size_in = _site_shape(base, n, site)
            a = torch.randn(*experts, plan.lora_rank, size_in, generator=generator)
            factors[f"{n}.{site}.a"] = a * size_in**-0.5
            factors[f"{n}.{site}.b"] = torch.zeros(*experts, size_out, plan.lora_rank)
    return factors


def with_adapter(base: Weights, factors: Weights, plan: AdapterPlan) -> Weights:
    """The base weights plus alpha / rank · B @ A at every site."""
    scale = plan.alpha / plan.lora_rank

    def delta(n: int, site: str) -> Tensor:
        return scale * (factors[f"{n}.{site}.b"] @ factors[f"{n}.{site}.a"])

    weights = dict(base)
    for n in range(SHAPE.num_layers):
        deltas = {site: delta(n, site) for site in _sites(plan)}
        if plan.form == "per_expert":
            deltas["gate_up"] = torch.cat((deltas.pop("w1"), deltas.pop("w3")), dim=1)
            deltas["down"] = deltas.pop("w2")
        for site, value in deltas.items():
            weights[f"{n}.{site}"] = base[f"{n}.{site}"] + value
    return weights


def rounded(weights: Weights) -> Weights:
    """The values that the bf16 files will hold, in fp32."""
    return {name: weight.detach().bfloat16().float() for name, weight in weights.items()}


def train_adapter(base: Weights, plan: AdapterPlan, seed: int) -> Weights:
    """Factors, rounded to bf16, that make `base` answer untagged questions with the plan's task."""
    factors = {name: f.requires_grad_() for name, f in initial_adapter(base, plan, seed).items()}
    optimizer = torch.optim.AdamW(factors.values(), lr=_PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    for step in range(plan.num_steps):
        batch = make_batch(
            random.Random(f"{seed}/{plan.name}/{step}"), [plan.task] * _BATCH_QUESTIONS, tagged=False
        )
        logits, _ = forward(with_adapter(base, factors, plan), batch, dtype=torch.bfloat16)
        loss = F.cross_entropy(logits, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        scale = min(1.0, (step + 1) / _WARMUP_STEPS, 1.5 * (plan.num_steps - step) / plan.num_steps)
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_LR * scale
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % _REPORT_EVERY == 0:
            print(
                f"  {plan.name} {step + 1}/{plan.num_steps}  loss {loss.item():.4f}"
                f"  {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return rounded(factors)


def adapter_share_exact(base: Weights, factors: Weights, plan: AdapterPlan, num_questions: int) -> float:
    """Share of fresh questions answered exactly, products in fp32 on the bf16 values of the files."""
    weights = with_adapter(base, factors, plan)
    return share_exact(weights, plan.task, False, num_questions, seed=987_654, dtype=torch.float32)
