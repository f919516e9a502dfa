# SPDX-License-Identifier: Apache-2.0
"""CPU time of the whole front end per streamed token: HTTP, SSE, text, routing and the link to the engine.

    python -m bench.serve.bench_front_end --before DIR --before-python PY [--keys] [--out FILE]

Starts `moe-lora serve` on the demo's model from this tree and from another one, sends both the same
streaming completions in alternating rounds, and reads the processor time of each front end's process before
and after, with all its threads, without the engine's.  Every token of every stream is counted.  With --keys
this tree requires a key and gets it; the other one gets the same requests.

A process keeps the speed that its memory's pages give it: of two servers of one tree the first one took 8 to
30 % more time in every round.  So Python's memory lies in huge pages (6 % are left), both servers are started
--starts times, each first in half of them, and the ratio is the geometric mean over the starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness.interleave import interleave, ratio
from bench.harness.records import ROOT, Recorder
from moe_lora.report.results import git_state
from moe_lora.serve.api_keys import ApiKey, add_key

from .served_tree import ServedTree

ADAPTERS = ("rot13", "reverse", "upper", "leet")
PATHS = ("/v1/completions", "/v1/chat/completions")
PROMPT = "the quick brown fox:"
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class FrontEnd(ServedTree):
    """A server of one tree on the demo's model, with further `words`.  key: sent with each request."""

    def __init__(
        self, tree: Path, python: str, *words: str, num_streams: int, path: str, key: str | None = None
    ) -> None:
        words = ("demo/model", "--lora-dir", "demo/adapters", "--threads", "1", *words)
        super().__init__(tree, python, *words)
        self._num_streams = num_streams
        self._path = path
        self._authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"

    def __call__(self, num_steps: int) -> float:
        """Seconds of the front end's CPU time for num_steps tokens of each stream."""
        started_s = self._cpu_s()
        asyncio.run(self._stream_all(num_steps))
        return self._cpu_s() - started_s

    def _cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.process.pid}/task")
        return sum(int(one.read_text().split()[0]) for one in tasks.glob("*/schedstat")) / 1e9

    async def _stream_all(self, num_tokens: int) -> None:
        streams = (self._stream(ADAPTERS[n % len(ADAPTERS)], num_tokens) for n in range(self._num_streams))
        counts = await asyncio.gather(*streams)
        assert counts == [num_tokens] * self._num_streams, counts

    async def _stream(self, model: str, num_tokens: int) -> int:
        """Tokens streamed, as the last event's usage says."""
        prompt: dict[str, Any] = {"prompt": PROMPT}
        if "chat" in self._path:
            prompt = {"messages": [{"role": "user", "content": PROMPT}]}
        asked = {"model": model, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**prompt, **asked, **options}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += self._authorization
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
        assert events, answer[:500]
        num_events = sum(1 for event in events if json.loads(event)["choices"])
        assert num_events >= num_tokens, num_events
        found: int = json.loads(events[-1])["usage"]["completion_tokens"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--before-python", default=sys.executable, help="the Python that has it installed")
    parser.add_argument("--path", choices=PATHS, default=PATHS[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=160, help="tokens of each stream in a round")
    parser.add_argument("--rounds", type=int, default=5, help="of each start")
    parser.add_argument("--starts", type=int, default=4, help="of both servers")
    parser.add_argument("--keys", action="store_true", help="this tree wants a key")
    parser.add_argument("--out", help="append a record here")
    options = parser.parse_args()
    if options.starts % 2:
        parser.error("--starts must be even: each tree starts first in half of them")
    record = Recorder(options.out)
    trees = [("now", ROOT, sys.executable)]
    if options.before is not None:
        trees.append(("before", options.before.resolve(), options.before_python))
    os.environ.update(HUGE_PAGES)
    us: dict[str, list[float]] = {name: [] for name, _, _ in trees}
    ratios = []
    for start in range(options.starts):
        times = rounds_of_a_start(trees if start % 2 == 0 else trees[::-1], options)
        for name, found in times.items():
            us[name] += [1e6 * step_s / options.streams for step_s in found]
        if "before" in times:
            ratios.append(ratio(times["now"], times["before"])["median"])
    result: dict[str, Any] = {
        "cpu_us_per_token": {name: statistics.median(found) for name, found in us.items()}
    }
    result |= {"cpu_us_per_token_rounds": us, "load_average": os.getloadavg()[0]}
    if ratios:
        result["now_over_before"] = {"mean": statistics.geometric_mean(ratios), "starts": ratios}
    print(json.dumps(result, indent=1))
    config = {"path": options.path, "streams": options.streams, "steps": options.steps}
    config |= {"rounds": options.rounds, "starts": options.starts, "keys": options.keys}
    config |= {"before": options.before and git_state(options.before)["git_commit"]}
    record(config, result)


def rounds_of_a_start(
    trees: list[tuple[str, Path, str]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Starts the trees' servers in this order; each one's seconds of CPU time per step in each round."""
    with ExitStack() as servers:
        words: dict[str, tuple[str, ...]] = {}
        key = None
        if options.keys:
            keys = Path(servers.enter_context(tempfile.TemporaryDirectory())) / "keys"
            key = add_key(keys, ApiKey(id="x", digest="", tenant="one", adapters=ADAPTERS))
            words["now"] = ("--api-keys", str(keys))
        contestants = {}
        for name, tree, python in trees:
            more = words.get(name, ())
            front_end = FrontEnd(tree, python, *more, num_streams=options.streams, path=options.path, key=key)
            servers.enter_context(front_end)(options.steps)
            contestants[name] = (front_end, options.steps, options.rounds)
        return interleave(contestants, options.rounds)


if __name__ == "__main__":
    main()
