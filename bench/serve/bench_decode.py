# SPDX-License-Identifier: Apache-2.0
"""Time between the tokens of streams over HTTP, from this tree and from another one.

    python -m bench.serve.bench_decode --before DIR --before-python PY [--quantize int4] [--out FILE]

Both serve one random Llama of 440 million weights as for a user: front end, engine process and its threads
share the machine's cores.  By turns each answers 1, 8 and 16 streams; time runs from a stream's second token
to its last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.harness.interleave import interleave, ratio
from bench.harness.random_model import TINY, write_model
from bench.harness.records import ROOT, Recorder
from bench.quantised.bench_quantised import LLAMA, PROMPT_LEN
from moe_lora.report.results import git_state

from .served_tree import ServedTree, event_times

STREAMS = (1, 8, 16)


def seconds(
    server: ServedTree,
    vocab_size: int,
    num_streams: int,
    num_steps: int,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> float:
    """Of num_steps decode steps, the median over streams.  fields: more of each request's body."""

    async def run() -> list[float]:
        return await asyncio.gather(
            *(_stream(server.port, n, vocab_size, num_steps, fields) for n in range(num_streams))
        )

    return statistics.median(asyncio.run(run()))


async def _stream(
    port: int, number: int, vocab_size: int, num_steps: int, fields: Mapping[str, Any]
) -> float:
    prompt = [(number * 131 + i * 17 + 5) % vocab_size for i in range(PROMPT_LEN)]
    asked: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": num_steps + 2}
    asked |= {"temperature": 0, "ignore_eos": True, "stream": True, **fields}
    times_s, line = await event_times(port, "/v1/completions", asked)
    assert len(times_s) >= num_steps + 2, (len(times_s), line)
    return (times_s[-1] - times_s[1]) * num_steps / (len(times_s) - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--before-python", default=sys.executable, help="the Python that has it installed")
    parser.add_argument("--quantize", default="int4")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, to see that it runs")
    parser.add_argument("--out", help="append records here")
    options = parser.parse_args()
    size, rounds = (LLAMA, options.rounds)
    if options.quick:
        size, rounds = replace(TINY, num_experts=0, hidden_size=64, intermediate_size=64), 1
    trees = {"now": (ROOT, sys.executable)}
    if options.before is not None:
        trees["before"] = (options.before.resolve(), options.before_python)
    record = Recorder(options.out)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        model = str(write_model(Path(folder) / "model", size))
        words = (model, "--quantize", options.quantize, "--max-num-seqs", "16", "--max-model-len", "512")
        contestants: dict[Any, Any] = {}
        for name, (tree, python) in trees.items():
            server = servers.enter_context(ServedTree(tree, python, *words))
            for num in STREAMS:
                run = partial(seconds, server, size.vocab_size, num)
                run(options.steps)
                contestants[name, num] = (run, options.steps, rounds)
        times: dict[Any, list[float]] = interleave(contestants, rounds)
    for num in STREAMS:
        result: dict[str, Any] = {
            "ms_per_token": {name: 1e3 * statistics.median(times[name, num]) for name in trees},
            "ms_per_token_rounds": {name: [1e3 * one for one in times[name, num]] for name in trees},
        }
        if "before" in trees:
            result["before_over_now"] = ratio(times["before", num], times["now", num])
        print(num, json.dumps(result))
        config = {"bench": "serve_decode", "model": size.describe(), "quantize": options.quantize}
        config |= {"streams": num, "steps": options.steps}
        config |= {"before": options.before and git_state(options.before)["git_commit"]}
        record(config, result)


if __name__ == "__main__":
    main()
