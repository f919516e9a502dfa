# SPDX-License-Identifier: Apache-2.0
"""TTFT of a tenant beside another with its share of a server's load, and with ten times that.

    python -m bench.serve.bench_fairness [--out FILE] [--quick]

Two tenants with equal shares, each with its key, over HTTP.  First measures the server's capacity.  The
modest tenant sends half of its share (Poisson arrivals), the other its share or ten times as much, by turns,
on the same arrivals of the modest one.  Last, for comparison, both use one key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.random_model import TINY, write_model
from bench.harness.records import ROOT, Recorder
from bench.harness.tables import table
from bench.quantised.bench_quantised import LLAMA
from moe_lora.serve.api_keys import ApiKey, add_key

from .served_tree import ServedTree

SEQS, PROMPT_LEN, ANSWER_LEN = 8, 64, 32
SIZE = replace(LLAMA, hidden_size=512, intermediate_size=2048, num_layers=12, num_heads=8, num_kv_heads=4)
SIZE = replace(SIZE, vocab_size=4096)
"""50 million weights: steps of some 10 ms, so that the engine is the bottleneck, not HTTP."""
CASES = {"at its share": 1.0, "at 10 x its share": 10.0}
BUDGET = 2 * PROMPT_LEN
"""Prompt tokens of a step: short steps, short waits of new prompts."""
MOST_QUEUED = 64
"""Most waiting requests of one tenant: more are refused, as by default beyond 2 M tokens."""


@dataclass(frozen=True)
class Asked:
    """A request: time, tenant, result.  ttft_s: None if refused."""

    at_s: float
    tenant: str
    status: int = 0
    ttft_s: float | None = None


class Client:
    """Sends requests at due times, open-loop."""

    def __init__(self, port: int, keys: dict[str, str], vocab_size: int) -> None:
        self._port, self._keys, self._vocab_size = port, keys, vocab_size
        self._random = random.Random(0)

    async def ask(self, one: Asked, begin_s: float) -> Asked:
        await asyncio.sleep(begin_s + one.at_s - time.perf_counter())
        prompt = [self._random.randrange(3, self._vocab_size) for _ in range(PROMPT_LEN)]
        asked: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": ANSWER_LEN}
        body = json.dumps({**asked, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._keys[one.tenant]}\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        due_s = begin_s + one.at_s
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, ttft_s = int((await reader.readline()).split()[1]), None
        async for line in reader:
            if ttft_s is None and line.startswith(b'data: {"id"'):
                ttft_s = time.perf_counter() - due_s
        writer.close()
        return replace(one, status=status, ttft_s=ttft_s)

    def run(self, asked: list[Asked]) -> list[Asked]:
        async def all_of_them() -> list[Asked]:
            begin_s = time.perf_counter() + 0.1
            return list(await asyncio.gather(*(self.ask(one, begin_s) for one in asked)))

        return asyncio.run(all_of_them())

    def capacity_per_s(self, num: int) -> float:
        """Served requests per second with a full queue."""
        began_s = time.perf_counter()
        found = self.run([Asked(0.0, tenant) for tenant in ("modest", "other") for _ in range(num // 2)])
        assert all(one.status == 200 for one in found)
        return num / (time.perf_counter() - began_s)


def arrivals(tenant: str, per_s: float, duration_s: float, seed: int) -> list[Asked]:
    """Poisson."""
    generator = np.random.default_rng(seed)
    times_s = np.cumsum(generator.exponential(1 / per_s, int(2 * per_s * duration_s) + 20))
    return [Asked(float(at_s), tenant) for at_s in times_s if at_s < duration_s]


def measure(client: Client, share_per_s: float, case: float, duration_s: float, seed: int) -> dict[str, Any]:
    """The modest tenant's TTFTs, and the outcome of all requests."""
    modest = arrivals("modest", share_per_s / 2, duration_s, seed)
    found = client.run([*modest, *arrivals("other", case * share_per_s, duration_s, seed + 1000)])
    answers = Counter(f"{one.tenant} {one.status}" for one in found)
    ttft_ms = [1e3 * one.ttft_s for one in found if one.tenant == "modest" and one.ttft_s is not None]
    return {"ttft_ms": ttft_ms, "p95_ms": float(np.percentile(ttft_ms, 95)), "answers": dict(answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one short round: does it run?")
    parser.add_argument("--out", help="append records here")
    options = parser.parse_args()
    size, rounds, duration_s = SIZE, options.rounds, options.seconds
    if options.quick:
        size, rounds, duration_s = replace(TINY, num_experts=0), 1, 2.0
    record = Recorder(options.out)
    with tempfile.TemporaryDirectory() as folder:
        model, file = write_model(Path(folder) / "model", size), Path(folder) / "keys"
        keys = {name: add_key(file, ApiKey(id="x", digest="", tenant=name)) for name in ("modest", "other")}
        words = f"{model} --max-num-seqs {SEQS} --max-model-len 256 --threads 1 --api-keys {file}"
        words += f" --max-num-batched-tokens {BUDGET}"
        words += f" --set front_end.max_queued_tokens_per_client={1024 * MOST_QUEUED}"
        with ServedTree(ROOT, sys.executable, *words.split()) as server:
            client = Client(server.port, keys, size.vocab_size)
            client.capacity_per_s(2 * SEQS)
            capacity_per_s = client.capacity_per_s(6 * SEQS)
            print(f"{capacity_per_s:.1f} requests/s are served", flush=True)
            share_per_s = capacity_per_s / 2
            cases: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
            for seed in range(rounds):
                for name, times in CASES.items():
                    cases[name].append(measure(client, share_per_s, times, duration_s, seed))
            one_key = Client(server.port, dict.fromkeys(keys, keys["other"]), size.vocab_size)
            alone = measure(one_key, share_per_s, CASES["at 10 x its share"], duration_s, 0)
    rows: list[dict[str, Any]] = [
        {
            "other": name,
            "requests": sum(len(one["ttft_ms"]) for one in found),
            "ttft_p50_ms": round(float(np.median([ms for one in found for ms in one["ttft_ms"]])), 1),
            "ttft_p95_ms": round(float(np.percentile([ms for one in found for ms in one["ttft_ms"]], 95)), 1),
            "answers": dict(sum((Counter(one["answers"]) for one in found), Counter())),
        }
        for name, found in {**cases, "at 10 x, with one key": [alone]}.items()
    ]
    print(table(rows, "a tenant at half of its share, beside another"))
    at_share, at_ten = ([one["p95_ms"] for one in cases[name]] for name in CASES)
    ratios = [after / before for before, after in zip(at_share, at_ten, strict=True)]
    result = {
        "rows": rows,
        "capacity_per_s": capacity_per_s,
        "p95_ratio": rows[1]["ttft_p95_ms"] / rows[0]["ttft_p95_ms"],
        "p95_ratio_rounds": ratios,
        "p95_ratio_median": statistics.median(ratios),
    }
    print({key: value for key, value in result.items() if key != "rows"})
    config = {"bench": "fairness", "model": size.describe(), "max_num_seqs": SEQS, "rounds": rounds}
    config |= {
        "max_num_batched_tokens": BUDGET,
        "prompt_len": PROMPT_LEN,
        "answer_len": ANSWER_LEN,
        "seconds": duration_s,
        "quick": options.quick,
    }
    record(config, result)


if __name__ == "__main__":
    main()
