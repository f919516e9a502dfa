# SPDX-License-Identifier: Apache-2.0
"""Cost of the cache's bookkeeping for the engine: a request's match and update, and a swap decision.

    python -m bench.cache.bench_cache_overhead --out bench/results/cache_overhead.jsonl [--nodes 100000]

2000 adapters, each with a system prompt and conversations of 5 turns, 3 blocks of 16 tokens per turn.  The
device has pages for 70 % of the nodes, the host for 90 %; requests build the tree through the cache's own
interface.  Then requests continue conversations drawn by Zipf's law (exponent 1); after 8 turns a
conversation starts anew.  A tick comes every 100 ms of their clock; orders are confirmed at once.  Match +
update is `match`, `publish` and `release`, with the swap-in of a match; "resident" requests found their whole
prefix on the device.  A decision ranks all candidates and picks 1 % of the device's pages.  Times are
processor time of this process without garbage collection.  One record per policy.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

import networkx

from bench.harness.records import Recorder
from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.timing.host_times import CacheCosts

BLOCK_SIZE = 16
SYSTEM_BLOCKS, TURN_BLOCKS, TURNS, MAX_TURNS = 8, 3, 5, 8
NUM_ADAPTERS = 2000
LAYER_PAGES = (1,) * 32
VOCABULARY = 32_000
PAPER_US = {"resident_match_update_us": 500.0, "match_update_us": 500.0, "decision_us": 5000.0}
GOAL_US = {"resident_match_update_us": 50.0, "match_update_us": 50.0, "decision_us": 2000.0}


class Clocked:
    """Processor seconds of calls by name, in order.

    gc_s: time of garbage collections, excluded as chance and mostly this script's.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.gc_s = 0.0
        self._gc_start_s = 0.0
        gc.callbacks.append(self._note_collection)

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        gc_s, start_s = self.gc_s, time.process_time()
        result = call(*args, **named)
        taken_s = time.process_time() - start_s - (self.gc_s - gc_s)
        self.seconds.setdefault(name, []).append(taken_s)
        return result

    def close(self) -> None:
        """Stop watching the collector."""
        gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_start_s = time.process_time()
        else:
            self.gc_s += time.process_time() - self._gc_start_s


class Conversations:
    """Requests of ongoing conversations, a turn each."""

    def __init__(self, cache: UnifiedCache, num_conversations: int, seed: int) -> None:
        self.cache = cache
        self.random = Random(seed)
        self.now_s = 0.0
        self.clocked = Clocked()
        self.owners = [number % NUM_ADAPTERS + 1 for number in range(num_conversations)]
        self.history = [self._system_prompt(owner) for owner in self.owners]

    def turn(self, number: int) -> bool:
        """One request; False without room."""
        cache, clocked, owner = self.cache, self.clocked, self.owners[number]
        self.now_s += 0.018
        if clocked("hold", cache.hold, owner, self.now_s) is Readiness.NO_ROOM:
            return False
        tokens = self.history[number] + self._tokens(TURN_BLOCKS, self.random)
        table = clocked("match", cache.match, owner, tokens, self.now_s)
        resident = table.ready
        self._confirm()
        grown = clocked("grow", cache.grow, table, len(tokens), self.now_s)
        if grown:
            clocked("publish", cache.publish, table, tokens, len(tokens), self.now_s)
            longest = (SYSTEM_BLOCKS + MAX_TURNS * TURN_BLOCKS) * BLOCK_SIZE
            self.history[number] = tokens if len(tokens) < longest else self._system_prompt(owner)
        clocked("release", cache.release, table, self.now_s)
        clocked("let_go", cache.let_go, owner, self.now_s)
        if grown and resident:
            parts = [clocked.seconds[name][-1] for name in ("match", "publish", "release")]
            clocked.seconds.setdefault("resident_match_update", []).append(sum(parts))
        return grown

    def tick(self) -> None:
        self.clocked("tick", self.cache.tick, self.now_s, 32)
        self._confirm()

    def _confirm(self) -> None:
        for order in self.cache.take_orders():
            self.cache.copied(order.copy_id)

    def _system_prompt(self, owner: int) -> list[int]:
        return self._tokens(SYSTEM_BLOCKS, Random(owner))

    def _tokens(self, num_blocks: int, random: Random) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(num_blocks * BLOCK_SIZE)]


def build(policy: str, num_nodes: int) -> Conversations:
    """A tree of about num_nodes nodes, in use since it was filled."""
    num_conversations = num_nodes // TURNS
    pages = num_nodes * TURN_BLOCKS + NUM_ADAPTERS * (len(LAYER_PAGES) + SYSTEM_BLOCKS)
    costs = CacheCosts(page_bytes=1 << 20)
    cache = UnifiedCache(
        num_device_pages=int(0.7 * pages),
        num_host_pages=int(0.9 * pages),
        block_size=BLOCK_SIZE,
        policy=make_caching_policy(policy, costs),
    )
    for owner in range(1, NUM_ADAPTERS + 1):
        cache.add_adapter(owner, LAYER_PAGES, 0.0)
    talks = Conversations(cache, num_conversations, 0)
    for _ in range(TURNS):
        for number in range(num_conversations):
            talks.turn(number)
            if number % 100 == 0:
                talks.tick()
    return talks


def decide(talks: Conversations, repeats: int, *, everything: bool) -> tuple[list[float], int]:
    """Seconds of choosing pages to swap out (1 % of the device) among all device leaves, or among all nodes;
    and their number.
    """
    cache = talks.cache
    swapper, ranking = cache._swapper, cache._ranking
    wanted = cache._mover.device.num_pages // 100
    seconds, candidates = [], 0
    for _ in range(repeats):
        start = time.process_time_ns()
        rows = ranking.columns.where(0xFF) if everything else swapper.candidates_out(is_adapter=None)
        ranking.lowest(rows, wanted, talks.now_s)
        seconds.append((time.process_time_ns() - start) / 1e9)
        candidates = len(rows)
    return seconds, candidates


def measure(policy: str, num_nodes: int, num_requests: int) -> dict[str, Any]:
    """Means and the like of a full tree in use."""
    talks = build(policy, num_nodes)
    talks.clocked.close()
    talks.clocked = Clocked()
    random = Random(1)
    shuffled = random.sample(range(len(talks.owners)), len(talks.owners))
    refused = 0
    for number in range(num_requests):
        refused += not talks.turn(shuffled[int(len(shuffled) ** random.random()) - 1])
        if number % 6 == 0:
            talks.tick()
    talks.clocked.close()
    decisions, candidates = decide(talks, 50, everything=False)
    of_all, num_rows = decide(talks, 50, everything=True)
    seconds = talks.clocked.seconds
    parts = {f"{name}_us": statistics.mean(times) * 1e6 for name, times in seconds.items()}
    return {
        "num_nodes": talks.cache._tree.graph.number_of_nodes() - 1,
        "num_candidates": candidates,
        "num_rows": num_rows,
        "num_resident_requests": len(seconds["resident_match_update"]),
        "match_update_us": parts["match_us"] + parts["publish_us"] + parts["release_us"],
        "resident_match_update_median_us": statistics.median(seconds["resident_match_update"]) * 1e6,
        "decision_us": statistics.mean(decisions) * 1e6,
        "decision_max_us": max(decisions) * 1e6,
        "decision_of_all_us": statistics.mean(of_all) * 1e6,
        "tick_max_us": max(seconds["tick"]) * 1e6,
        **parts,
        "gc_us": talks.clocked.gc_s / num_requests * 1e6,
        "refused": refused,
        "usage": talks.cache.usage(),
    }


def main() -> None:
    """Measure every requested policy, write JSON lines, and print a comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument(
        "--policies", nargs="+", choices=sorted(CACHING_POLICIES), default=["cost-aware", "fastlibra", "lru"]
    )
    args = parser.parse_args()
    load = os.getloadavg()[0]
    record = Recorder(args.out, clock="processor time", networkx=networkx.__version__, load_average=load)
    for policy in args.policies:
        result = measure(policy, args.nodes, args.requests)
        record({"policy": policy, "num_nodes": args.nodes, "num_adapters": NUM_ADAPTERS}, result)
        for name, goal in GOAL_US.items():
            paper = PAPER_US[name]
            print(f"{policy:12} {name:24} {result[name]:7.0f} us, goal {goal:.0f}, paper {paper:.0f}")


if __name__ == "__main__":
    main()
