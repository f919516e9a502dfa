# SPDX-License-Identifier: Apache-2.0
"""Train an adapter and serve it from the first epoch on.

    python -m examples.train_to_serve

Plain torch trains a LoRA adapter for one of the demo's string tasks. After each epoch its tensors are
published into the running engine as a new version of the same name; a client thread keeps asking the
base model meanwhile and never waits for a swap. The last column is what a user sees: the share of fresh
questions that the served version answers exactly.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text
from demo.training.data import make_batch
from demo.training.export import adapter_tensors, read_base
from demo.training.lora import ATTENTION, AdapterPlan, initial_adapter, with_adapter
from demo.training.model import forward
from moe_lora import LLM, SamplingParams

MODEL_DIR = Path(__file__).parents[1] / "demo" / "model"
NAME = "student"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="rotate")
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps-per-epoch", type=int, default=12)
    parser.add_argument("--questions", type=int, default=100, help="asked after each epoch")
    options = parser.parse_args()
    plan = AdapterPlan(
        name=NAME, task=options.task, lora_rank=options.lora_rank, num_steps=options.steps_per_epoch
    )
    with LLM(str(MODEL_DIR), eager=True, num_threads=1) as llm, Traffic(llm) as traffic:
        print(
            f"{'epoch':>5} {'loss':>8} {'version':>8} {'publish':>9} {'answered meanwhile':>19} {'exact':>7}"
        )
        for epoch, (loss, factors) in enumerate(epochs(plan, options.epochs), 1):
            started = time.perf_counter()
            info = llm.publish_adapter(NAME, adapter_tensors(factors, plan), peft_config(plan))
            publish_ms = (time.perf_counter() - started) * 1e3
            exact = share_exact(llm, plan.task, options.questions, seed=epoch)
            row = f"{epoch:5} {loss:8.4f} {info.version:8} {publish_ms:6.0f} ms"
            print(f"{row} {traffic.num_answered:19} {exact:7.0%}", flush=True)


def epochs(plan: AdapterPlan, num_epochs: int):
    """Yield (loss, LoRA factors) after every `plan.num_steps` steps."""
    base = read_base(MODEL_DIR)
    factors = {name: f.requires_grad_() for name, f in initial_adapter(base, plan, seed=0).items()}
    optimizer = torch.optim.AdamW(factors.values(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    rng = random.Random(0)
    for _ in range(num_epochs):
        for _ in range(plan.num_steps):
            batch = make_batch(rng, [plan.task] * 64, tagged=False)
            logits, _ = forward(with_adapter(base, factors, plan), batch, dtype=torch.bfloat16)
            loss = F.cross_entropy(logits, batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item(), {name: f.detach() for name, f in factors.items()}


def peft_config(plan: AdapterPlan) -> dict:
    """The fields of adapter_config.json that say what the tensors mean."""
    return {
        "peft_type": "LORA",
        "r": plan.lora_rank,
        "lora_alpha": plan.alpha,
        "target_modules": [f"{site}_proj" for site in ATTENTION],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }


def share_exact(llm: LLM, task: str, num_questions: int, seed: int) -> float:
    rng = random.Random(seed)
    texts = [sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS)) for _ in range(num_questions)]
    found = llm.generate([prompt_for(text) for text in texts], NAME, GREEDY)
    return sum(c.text == TASKS[task](t) for c, t in zip(found, texts, strict=True)) / num_questions


class Traffic:
    """Someone else's requests: a thread that asks the base model all the time."""

    def __init__(self, llm: LLM) -> None:
        self.num_answered = 0
        self._llm = llm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._stop.wait(0.05):
            [answer] = self._llm.generate(prompt_for("hello"), sampling=GREEDY)
            assert answer.finish_reason == "stop"
            self.num_answered += 1

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main()
