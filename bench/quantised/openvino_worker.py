# SPDX-License-Identifier: Apache-2.0
"""A model in OpenVINO GenAI that decodes on demand: run by `bench_openvino` with another Python.

    PYTHON openvino_worker.py MODEL_DIR THREADS PROMPT_LEN VOCAB_SIZE

Reads lines of "requests steps"; answers with {"s": seconds of decode}, or {"error": ...}.
Prompts are those of `bench_quantised`, computed first in every call, untimed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's output is no answer
    numpy, openvino = importlib.import_module("numpy"), importlib.import_module("openvino")
    genai = importlib.import_module("openvino_genai")
    model_dir, threads, prompt_len, vocab_size = sys.argv[1], *map(int, sys.argv[2:5])
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 4096, 64, 1
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    pipeline = genai.ContinuousBatchingPipeline(
        model_dir,
        scheduler_config=scheduler,
        device="CPU",
        properties={"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"},
        tokenizer_properties={},
    )
    print("ready", file=answers, flush=True)
    next_id = 0

    def decode(requests: int, steps: int) -> dict[str, Any]:
        nonlocal next_id
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = steps + 1
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        handles = []  # a request without one is dropped
        for s in range(requests):
            prompt = [[(s * 131 + i * 17 + 5) % vocab_size for i in range(prompt_len)]]
            tokens = openvino.Tensor(numpy.array(prompt, dtype=numpy.int64))
            handles.append(pipeline.add_request(next_id, tokens, config))
            next_id += 1
        pipeline.step()
        begin, done = time.perf_counter(), 0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            done += 1
        seconds = time.perf_counter() - begin
        lengths = {len(handle.read_all()[0].generated_ids) for handle in handles}
        right = done == steps and lengths == {steps + 1}
        return {"s": seconds} if right else {"error": f"{done} steps instead of {steps}, tokens {lengths}"}

    for line in sys.stdin:
        requests, steps = map(int, line.split())
        print(json.dumps(decode(requests, steps)), file=answers, flush=True)


if __name__ == "__main__":
    main()
