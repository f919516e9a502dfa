# SPDX-License-Identifier: Apache-2.0
"""Training of the base model: all tasks at once, each asked with its tag; untagged text is repeated."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from demo.tasks import TASKS

from .data import make_batch
from .model import Weights, forward, initial_weights
from .optimizer import MuonAdamW

NUM_STEPS = 2400
_BATCH_QUESTIONS = 192
_WARMUP_STEPS = 50
_DECAY_FROM = 0.3
_BALANCE_WEIGHT = 0.02
_REPORT_EVERY = 100
# Tasks that are learned late stand twice in the mix, and so does repeating, which adapters start from.
_TASK_MIX = [*TASKS, None, None, "reverse", "swap_pairs", "every_second", "no_vowels", "squeeze"]


def _schedule(step: int, num_steps: int) -> float:
    """Linear warm-up, constant, linear decay to zero over the last part."""
    return min(1.0, (step + 1) / _WARMUP_STEPS, (num_steps - step) / (num_steps * (1 - _DECAY_FROM)))


def share_exact(
    weights: Weights, task: str | None, tagged: bool, num_questions: int, seed: int, dtype
) -> float:
    """Share of fresh questions whose greedy answer is right to the last character and ends there.

    Every answer token being the most likely one, given the right ones before it, is the same as
    a right greedy answer; so one forward pass does.
    """
    batch = make_batch(random.Random(seed), [task] * num_questions, tagged)
    with torch.no_grad():
        logits, _ = forward(weights, batch, dtype=dtype)
    wrong = (logits.argmax(-1) != batch.targets).nonzero().flatten()
    return 1 - len(batch.questions[batch.asked[wrong]].unique()) / num_questions


def train_base(checkpoint: Path, seed: int, num_steps: int = NUM_STEPS) -> Weights:
    """fp32 weights after `num_steps`; a stopped run goes on from the state saved in `checkpoint`."""
    weights = {name: weight.requires_grad_() for name, weight in initial_weights(seed).items()}
    optimizer = MuonAdamW(weights)
    first_step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(saved["weights"][name])
        optimizer.load_state(saved["optimizer"])
        first_step = saved["step"]
    started = time.monotonic()
    total = 0.0
    for step in range(first_step, num_steps):
        rng = random.Random(f"{seed}/base/{step}")
        batch = make_batch(rng, rng.choices(_TASK_MIX, k=_BATCH_QUESTIONS), tagged=True)
        logits, balance = forward(weights, batch, dtype=torch.bfloat16)
        loss = F.cross_entropy(logits, batch.targets)
        (loss + _BALANCE_WEIGHT * balance).backward()
        optimizer.step(_schedule(step, num_steps))
        total += loss.item()
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == num_steps:
            _save(checkpoint, weights, optimizer, step + 1)
            shares = [share_exact(weights, task, True, 32, step, torch.bfloat16) for task in (None, *TASKS)]
            print(
                f"base {step + 1}/{num_steps}  loss {total / _REPORT_EVERY:.4f}  balance {balance.item():.2f}"
                f"  exact {sum(shares) / len(shares):.3f} (worst {min(shares):.2f})"
                f"  {time.monotonic() - started:.0f} s",
                flush=True,
            )
            total = 0.0
    return {name: weight.detach() for name, weight in weights.items()}


def _save(checkpoint: Path, weights: Weights, optimizer: MuonAdamW, step: int) -> None:
    """Write beside and rename, so that a stop during the write costs nothing."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save({"weights": weights, "optimizer": optimizer.state(), "step": step}, partial)
    partial.replace(checkpoint)
