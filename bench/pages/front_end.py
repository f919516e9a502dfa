# SPDX-License-Identifier: Apache-2.0
"""Front end, steps, failures and pool in one table, a row a bench: docs/results/serving.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench.harness.records import Record
from moe_lora.config import ROUTINGS

from .claims import failures
from .evidence import Config, records
from .markdown import table

CROWDS = ("1000 streams", "10000 connections")
WAYS = ("shm by layer", "shm whole", "shm for two ranks", "gloo by layer", "disk")
BEFORE_TOOLS = "ab63d1aa"
"""The commit that the front end is compared with."""


def summary() -> str:
    """Question, result and the record's file and commit."""
    parts = (_front_end, _steps, _masks, _fairness, _attacks, _loads, _scale, _pool, _registry)
    rows = (row for part in parts for row in part())
    return table(("question", "result", "record"), rows)


def _results(name: str, **wanted: Any) -> tuple[list[Config], str]:
    """Results of the records with these settings, and a link with the last one's commit."""
    found = records(name, lambda config, result: all(config.get(key) == one for key, one in wanted.items()))
    return [one["result"] for one in found], _link(name, found[-1])


def _link(name: str, one: Record) -> str:
    return f"[{name}](../../bench/results/{name}), `{one['env']['git_commit'][:7]}`"


def _front_end() -> Iterator[tuple[str, str, str]]:
    name = "front_end.jsonl"
    found = records(name, lambda config, result: config["before"].startswith(BEFORE_TOOLS))
    plain = [one["result"] for one in found if not one["config"]["keys"]]
    (keys,) = (one["result"]["now_over_before"]["mean"] for one in found if one["config"]["keys"])
    (itself,) = (one["result"]["now_over_before"]["mean"] for one in records(name, _is_one_tree))
    times = " / ".join(f"{one['cpu_us_per_token']['now']:.1f}" for one in plain)
    ratios = " / ".join(f"{one['now_over_before']['mean']:.2f}" for one in plain)
    yield (
        "front end's CPU time a token, 64 streams of completions / of chats",
        f"{times} µs; {ratios} of the commit before tools, goal 1.05; with keys {keys:.2f}; one tree against "
        f"itself {itself:.2f}",
        _link(name, found[0]),
    )


def _is_one_tree(config: Config, result: Config) -> bool:
    return not config["before"].startswith(BEFORE_TOOLS)


def _steps() -> Iterator[tuple[str, str, str]]:
    name, parts = "house_speed.jsonl", {"coupled": "", "lora_server": " with a LoRA Server"}
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for one in records(name, lambda config, result: config["part"] in parts):
        config, result, commit = one["config"], one["result"], one["env"]["git_commit"][:7]
        over = f"{result['after_over_before']['median']:.2f}"
        requests = config["what"].removesuffix(" requests")
        found[parts[config["part"]], commit][requests] = over if result["no_slower"] else f"**{over}**"
    yield (
        "time of a step over an earlier commit's, by requests in a batch",
        "; ".join(
            f"{' / '.join(ratios)}{part}: {' / '.join(ratios.values())} (`{commit}`)"
            for (part, commit), ratios in found.items()
        )
        + "; bold: above 1.03 and the noise",
        f"[{name}](../../bench/results/{name})",
    )


def _masks() -> Iterator[tuple[str, str, str]]:
    (found,), link = _results("serve_masks.jsonl")
    over, plain_ms = found["grammar_over_plain"], found["ms_per_token"]["plain"]
    yield (
        "16 streams within a schema over the same without, 151 936 tokens, Llama of 453 M weights in int4",
        f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f}) of {plain_ms:.0f} ms, goal 1.05",
        link,
    )


def _fairness() -> Iterator[tuple[str, str, str]]:
    (found,), link = _results("fairness.jsonl")
    alone, beside, one_key = (one["ttft_p95_ms"] for one in found["rows"])
    yield (
        "TTFT P95 of a modest tenant beside one at its share / at ten times its share",
        f"{alone:.0f} / {beside:.0f} ms, ratio {found['p95_ratio']:.2f}, goal 1.20; with one key for both "
        f"{one_key / 1000:.1f} s",
        link,
    )


def _attacks() -> Iterator[tuple[str, str, str]]:
    name = "hostile.jsonl"
    for one in records(name, lambda config, result: config["only"] is None):
        found = one["result"]
        wait = f"{found['longest_wait_s']:.3g} s"
        yield (
            f"{found['num_attacks']} attacks beside 16 streams",
            f"{found['wrong_5xx']} statuses from 500 on but 503; {found['failed']} streams failed; front end "
            f"{found['rss_mb']} MB; longest wait {wait if found['longest_wait_s'] < 1 else f'**{wait}**'}, "
            "goal 1 s",
            _link(name, one),
        )


def _loads() -> Iterator[tuple[str, str, str]]:
    (soak,), link = _results("soak.jsonl")
    memory = max(one["grew"] / one["mean"] for one in soak["rows"] if one["what"].endswith("rss_mb"))
    yield (
        "half an hour of clients and changing adapters",
        f"{soak['counts']['stream 200']:,} streams, {soak['num_complaints']} complaints; memory of a process "
        f"grows by {memory:.1%} at most",
        link,
    )
    (crowd,), link = _results("crowd.jsonl")
    streams, connections = (next(one for one in crowd["rows"] if one["what"] == what) for what in CROWDS)
    yield (
        " / ".join(CROWDS),
        f"{streams['right']:,} right answers / {connections['kept']:,} kept; front end "
        f"{max(one['rss_mb'] for one in crowd['rows']):.0f} MB at most",
        link,
    )
    yield "faults of all parts", failures(), "[chaos.jsonl](../../bench/results/chaos.jsonl)"
    found, link = _results("traces.jsonl", num_lines=5_000_000)
    peak_bytes = max(one.get("peak_rss_bytes", 0) for one in found)
    yield "trace of 5 million requests, peak memory", f"{peak_bytes / 1e6:.0f} MB", link


def _scale() -> Iterator[tuple[str, str, str]]:
    found, link = _results("scale.jsonl", what="changes", num_adapters=100_000)
    (change,) = found
    yield (
        "100,000 adapters at 256 stand-ins for instances: a load, until two front ends have it",
        f"{change['change_p50_s']:.2f} s, goal 1 s; {change['change_bytes']} bytes to each, all adapters "
        f"{change['state_bytes'] / 1e6:.1f} MB; idle controller {change['idle_cores']:.2f} cores, "
        f"{change['controller_gb']:.1f} GB",
        link,
    )
    known = records("scale.jsonl", lambda config, result: config["num_adapters"] == 100_000)
    results = {one["config"]["what"]: one["result"] for one in known}
    names = [name for name in ROUTINGS if name in results]
    times = " / ".join(f"{results[name]['p50_us']:.0f}" for name in names)
    yield f"a choice among them by {' / '.join(names)}, P50", f"{times} µs, goal 50", link


def _pool() -> Iterator[tuple[str, str, str]]:
    name = "pool.jsonl"
    found = records(name)
    for lora_rank in (64, 8):
        of_rank = (one for one in found if one["config"]["lora_rank"] == lora_rank)
        ways = {one["config"]["way"]: one["result"] for one in of_rank}
        times = " / ".join(f"{ways[way]['over_memcpy']['median']:.1f}" for way in WAYS)
        yield (
            f"an adapter of {ways[WAYS[0]]['nbytes'] / 1e6:.0f} MB over {' / '.join(WAYS)}, in memcpys",
            times,
            _link(name, found[0]),
        )


def _registry() -> Iterator[tuple[str, str, str]]:
    name = "registry.jsonl"
    found = records(name, lambda config, result: config["num_adapters"] == 40_000)
    of = {one["config"]["what"]: one["result"] for one in found}
    calls = "add, last", "get", "resolve"
    times = " / ".join(f"{1e3 * of[call]['own_s']:.2f}" for call in calls)
    over = " / ".join(f"{of[call]['own_over_bare']['median']:.1f}" for call in calls)
    yield (
        "registry of 40,000 adapters: add the last / look up / resolve",
        f"{times} ms; {over} times bare files and SQLite",
        _link(name, found[0]),
    )
