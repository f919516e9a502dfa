# SPDX-License-Identifier: Apache-2.0
"""Does the engine answer on CUDA, compiled and eager, and at which decode speed?

    python -m bench.gpu.gpu_smoke --out FILE

The tiny size makes no claim of speed, only of answers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from bench.harness.records import Recorder
from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text
from moe_lora import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "demo"
NUM_REQUESTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON lines are appended here")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    record = Recorder(options.out)
    for eager in (True, False):
        config = {
            "bench": "gpu_smoke",
            "device": options.device,
            "eager": eager,
            "num_requests": NUM_REQUESTS,
        }
        result = measure(options.device, eager)
        record(config, result)
        print(config, result, flush=True)


def measure(device: str, eager: bool) -> dict:
    """Share of exact answers over all demo adapters in one batch, and output tokens per second."""
    adapters = json.loads((DEMO / "adapters" / "index.json").read_text())
    rng = random.Random(0)
    names = [rng.choice(list(adapters)) for _ in range(NUM_REQUESTS)]
    texts = [sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS)) for _ in names]
    paths = {name: str(DEMO / "adapters" / name) for name in adapters}
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(str(DEMO / "model"), adapters=paths, device=device, eager=eager) as llm:
        started = time.perf_counter()
        answers = llm.generate([prompt_for(text) for text in texts], names, greedy)
        seconds = time.perf_counter() - started
    rows = zip(names, texts, answers, strict=True)
    exact = sum(TASKS[adapters[name]["task"]](text) == answer.text for name, text, answer in rows)
    return {
        "exact": exact / NUM_REQUESTS,
        "output_tokens_per_s": sum(len(answer.token_ids) for answer in answers) / seconds,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


if __name__ == "__main__":
    main()
