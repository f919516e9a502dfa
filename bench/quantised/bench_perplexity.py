# SPDX-License-Identifier: Apache-2.0
"""Perplexity of small trained models per format of their weights, in fp32, by our own forward pass.

    python -m bench.quantised.bench_perplexity --out bench/results/quantised_perplexity.jsonl [--quick]

`demo`: answers to fresh questions by the demo model, the base (which repeats a text) and its 18 task
adapters, mixed in each batch.  `bytes`: a Llama of 0.4 million weights, trained here on nine of ten docs
pages, byte by byte, and tested on the tenth.  The same seeds on one thread give the same figures.
"""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness.records import ROOT, Record, Recorder
from bench.harness.tables import table
from demo.tasks import TASKS
from demo.training.data import question
from moe_lora.config.weight_format import weight_format
from moe_lora.models.quantised_weight import quantisation_of
from tests.models.harness import MAX_TOKENS, Harness, Stream

FORMATS: tuple[tuple[str, int | None], ...] = (
    ("none", None),
    ("int8", None),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("fp8", None),
    ("fp8", 128),
    ("int8-dynamic", None),
    ("int4-dynamic", 32),
)
QUESTIONS, STEPS, WINDOWS = 60, 400, 200
BATCH, LEARNING_RATE = 16, 3e-3

Asked = tuple[int, list[int], list[int]]
"""Slot of an adapter (-1: none), tokens of the context, judged tokens."""


def demo_questions(tasks: Sequence[str], count: int) -> list[Asked]:
    """For the base and each task's adapter in turn."""
    rng = random.Random(11)
    return [
        (slot, *question(rng, task, tagged=False))
        for _ in range(count)
        for slot, task in enumerate((None, *tasks), start=-1)
    ]


def docs_bytes() -> tuple[bytes, bytes]:
    """Training and held-out text."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    kept = [page.read_bytes() for i, page in enumerate(pages) if i % 10]
    return b"".join(kept), b"".join(page.read_bytes() for page in pages[::10])


def windows(text: bytes, count: int) -> list[Asked]:
    """Stretches of MAX_TOKENS bytes, the first half of each as context."""
    starts = range(0, len(text) - MAX_TOKENS, max(MAX_TOKENS, len(text) // count))
    half = MAX_TOKENS // 2
    return [(-1, list(text[s : s + half]), list(text[s + half : s + MAX_TOKENS])) for s in starts][:count]


def train(text: bytes, folder: Path, num_steps: int) -> Path:
    """A Llama over bytes, by AdamW with linear decay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, num_steps)
    data, rng = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), random.Random(0)
    for _ in range(num_steps):
        starts = [rng.randrange(len(data) - MAX_TOKENS) for _ in range(BATCH)]
        batch = torch.stack([data[s : s + MAX_TOKENS] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    model.save_pretrained(str(folder))
    return folder


@torch.inference_mode()
def losses(harness: Harness, asked: Sequence[Asked]) -> tuple[list[float], int]:
    """Negative log likelihoods of all judged tokens, and the number of most likely answers."""
    lanes = [harness.add() for _ in range(BATCH)]
    found: list[float] = []
    exact = 0
    for first in range(0, len(asked), BATCH):
        part = asked[first : first + BATCH]
        batch = [
            (Stream(slot, lane.pages), [*context, *answer[:-1]])
            for lane, (slot, context, answer) in zip(lanes, part, strict=False)
        ]
        for rows, (_, _, answer) in zip(harness.step(batch), part, strict=True):
            own, targets = rows[-len(answer) :].double(), torch.tensor(answer)
            found += torch.nn.functional.cross_entropy(own, targets, reduction="none").tolist()
            exact += bool((own.argmax(-1) == targets).all())
    return found, exact


def measured(
    model_dir: Path,
    adapters: Sequence[Path],
    asked: Sequence[Asked],
    recorder: Callable[..., Record],
    **config: Any,
) -> None:
    """A record of each format."""
    plain: list[float] = []
    for quantize, group_size in FORMATS:
        click.echo(f"{quantize}: {len(asked)} sequences", err=True)
        harness = Harness(model_dir, adapters, quantisation=quantisation_of(quantize, group_size, False))
        found, exact = losses(harness, asked)
        plain = plain or found
        mean = sum(found) / len(found)
        recorder(
            {"bench": "perplexity", "weights": weight_format({}, quantize, group_size).name, **config},
            {
                "perplexity": math.exp(mean),
                "over_unquantised": math.exp(mean - sum(plain) / len(plain)),
                "mean_loss": mean,
                "num_tokens": len(found),
                "exact_answers": exact / len(asked),
            },
        )


def lines(records: Sequence[Record]) -> list[dict[str, str]]:
    return [
        {
            "model": r["config"]["model"],
            "weights": r["config"]["weights"],
            "perplexity": f"{r['result']['perplexity']:.4f}",
            "over unquantised": f"{r['result']['over_unquantised']:.4f}",
            "exact answers": f"{r['result']['exact_answers']:.1%}" if r["config"]["model"] == "demo" else "",
        }
        for r in records
    ]


@click.command(help=__doc__)
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--quick", is_flag=True, help="Few questions, few steps, to see that it runs.")
def main(out: str | None, quick: bool) -> None:
    torch.set_num_threads(1)
    questions, steps, count = (2, 3, 4) if quick else (QUESTIONS, STEPS, WINDOWS)
    recorder = Recorder(out)
    tasks = tuple(TASKS)
    adapters = [ROOT / "demo" / "adapters" / task for task in tasks]
    measured(
        *(ROOT / "demo" / "model", adapters, demo_questions(tasks, questions), recorder),
        model="demo",
        questions=questions,
    )
    text, held_out = docs_bytes()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = train(text, Path(folder) / "model", steps)
        digest = hashlib.sha256(text + held_out).hexdigest()[:16]
        asked = windows(held_out, count)
        measured(model_dir, (), asked, recorder, model="bytes", steps=steps, windows=len(asked), text=digest)
    click.echo(table(lines(recorder.records), "\nPerplexity"))


if __name__ == "__main__":
    main()
