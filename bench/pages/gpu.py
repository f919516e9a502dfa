# SPDX-License-Identifier: Apache-2.0
"""Steps and kernels of one H200, from gpu.jsonl and lora_kernels_gpu.jsonl: docs/results/gpu.md, README.md.

Only parts that ran alone on the GPU count; of a whole model the last record of a batch.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.harness.records import Record

from .evidence import records
from .markdown import table

FILE, KERNELS = "gpu.jsonl", "lora_kernels_gpu.jsonl"
WHOLE = {"GPT-OSS-20B": 24, "Qwen3-30B-A3B": 48}
BATCHES = (1, 4, 16, 64)
GOALS = {"decode": 0.70, "prefill": 0.50, "copy": 0.85, "adapters": 0.90}


def _alone(kind: str, **wanted: Any) -> list[Record]:
    def is_it(config: dict[str, Any], result: dict[str, Any]) -> bool:
        if config["record"] != kind or not config.get("alone"):
            return False
        return all(result.get(name) == value for name, value in wanted.items())

    return records(FILE, is_it)


def _last(kind: str, **wanted: Any) -> tuple[dict[str, Any], str]:
    """The last such result, and its commit."""
    record = _alone(kind, **wanted)[-1]
    return record["result"], record["env"]["git_commit"][:7]


def _share(value: float, goal: float) -> str:
    return f"**{value:.2f}**" if round(value, 2) < goal else f"{value:.2f}"


def decode() -> str:
    """Decode steps of whole models, of the roofline."""
    rows = []
    for model, layers in WHOLE.items():
        cells = []
        for batch in BATCHES:
            result, commit = _last("decode", model=model, layers=layers, batch=batch)
            share = _share(result["of_roofline"], GOALS["decode"])
            cells.append(f"{share} ({result['step_ms']:.3g} ms, `{commit}`)")
        rows.append((f"{model}, {layers} layers", *cells, f"{GOALS['decode']:.2f}"))
    head = ("decode, share of the roofline", "1 request", *map(str, BATCHES[1:]), "goal")
    return table(head, rows)


def prefill() -> str:
    """Prompts of whole models, of a GEMM's rate."""
    rows = []
    for model, layers in WHOLE.items():
        result, commit = _last("prefill", model=model, layers=layers)
        share = f"{_share(result['of_gemm'], GOALS['prefill'])} ({result['TFLOP_s']:.0f} TFLOP/s)"
        rows.append((f"{model}, {layers} layers (`{commit}`)", share, f"{GOALS['prefill']:.2f}"))
    return table(("prefill, 4 prompts of 2 048 tokens in a step", "share of a GEMM's rate", "goal"), rows)


def adapters() -> str:
    """Decode steps with adapters beside the base model's, by the number of requests."""
    rows, commit = [], _last("lora_launches", batch=BATCHES[-1], arm="base", way="after")[1]
    for name, arm, way in (
        ("8 adapters", "zipf of 8", "beside"),
        ("8 adapters, each site after its base layer", "zipf of 8", "after"),
        ("64 adapters", "zipf of 64", "beside"),
    ):
        cells = [f"{share:.2f}" for share in of_base(arm, way)]
        rows.append((name, *["–"] * (len(BATCHES) - len(cells)), *cells))
    head = (f"tokens/s, of the base model's (`{commit}`)", "1 request", *map(str, BATCHES[1:]))
    return table(head, rows)


def of_base(arm: str, way: str) -> list[float]:
    """Tokens/s over the base model's, by the number of requests."""
    shares = []
    for batch in BATCHES if arm == "zipf of 8" else BATCHES[-1:]:
        base, _ = _last("lora_launches", batch=batch, arm="base", way="after")
        step, _ = _last("lora_launches", batch=batch, arm=arm, way=way)
        shares.append(statistics.median(base["step_ms"]) / statistics.median(step["step_ms"]))
    return shares


def of_roofline(model: str) -> list[float]:
    """Shares of the roofline of a whole model's decode steps, by the number of requests."""
    return [
        _last("decode", model=model, layers=WHOLE[model], batch=batch)[0]["of_roofline"] for batch in BATCHES
    ]


def serving() -> str:
    """`moe-lora serve` under load: prompts' steps launched one by one, and replayed."""
    rows = []
    for rate in (12.0, 24.0):
        (before, _), (now, commit) = (_last("serve", tree=tree, rate=rate) for tree in ("before", "now"))
        cells = []
        for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "gap_ms_p99"):
            cells.append(f"{before[name]:.3g} / {now[name]:.3g} ms ({before[name] / now[name]:.1f} x)")
        rows.append((f"{rate:g} requests/s", *cells))
    head = (f"before / now (`{commit}`)", "first token, median", "99 %", "per token, median", "99 %")
    return table((*head, "between tokens, 99 %"), rows)


def adapters_by_popularity() -> str:
    """64 requests over 64 adapters, drawn by Zipf or all distinct, round by round beside the base model."""
    base = _rounds("base")
    rows = []
    for arm, name in (("zipf", "Zipf 1.2 ({} adapters in the batch)"), ("distinct", "{} distinct adapters")):
        steps = _rounds(arm)
        ratios = [one["step_ms"] / other["step_ms"] for one, other in zip(base, steps, strict=True)]
        share = _share(statistics.median(ratios), GOALS["adapters"])
        allowed = sum(base[0]["bytes"].values()) / sum(steps[0]["bytes"].values())
        roofline = statistics.median(one["of_roofline"] for one in steps)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        about = name.format(steps[0]["adapters"])
        rows.append((about, f"{share} ({spread})", f"{allowed:.2f}", f"{roofline:.2f}"))
    head = ("", f"tokens/s, of the base model's (goal {GOALS['adapters']:.2f})", "bytes alone allow")
    return table((*head, "step, of the roofline of base and adapters (goal 0.70)"), rows)


def _rounds(arm: str) -> list[dict[str, Any]]:
    return [one["result"] for one in _alone("zipf_adapters", arm=arm, layers=12)]


def _cases() -> dict[str, dict[str, dict[str, Any]]]:
    """Decode case -> kernel -> result."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for one in records(KERNELS, lambda config, result: config["group"] == "decode"):
        cases.setdefault(one["config"]["case"], {})[one["config"]["kernel"]] = one["result"]
    return cases


def peer_ratios() -> list[float]:
    """vLLM's time by ours, of the cases that vLLM takes."""
    return [
        kernels["vLLM fused_moe_lora"]["time_ms"] / kernels["our sgmv"]["time_ms"]
        for kernels in _cases().values()
        if kernels["vLLM fused_moe_lora"].get("time_ms")
    ]


def kernels() -> str:
    """Decode cases of our kernel: share of the copy rate, and vLLM's time by ours."""
    rows = []
    for case, contestants in _cases().items():
        ours, peer_ms = contestants["our sgmv"], contestants["vLLM fused_moe_lora"].get("time_ms")
        ratio = f"{peer_ms / ours['time_ms']:.2g}" if peer_ms else "does not take it"
        rows.append((case.removeprefix("decode "), _share(ours["of_copy"]["median"], GOALS["copy"]), ratio))
    return table(("", f"of copy (goal {GOALS['copy']})", "vLLM's time by ours"), rows)
