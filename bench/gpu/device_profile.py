# SPDX-License-Identifier: Apache-2.0
"""The profile of the measured GPU, from its records: `moe_lora/provision/profiles/h200.json`.

    python -m bench.gpu.device_profile > moe_lora/provision/profiles/h200.json

Counts only parts that ran alone on the GPU, whole models of each model's last commit.  A decode step is
fitted as layers * fixed + bytes / rate (relative least squares); deltas as a fixed time per layer beside
their bytes at that rate.  Missing records give no entry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

RECORDS = Path(__file__).parents[1] / "results" / "gpu.jsonl"
WHOLE_LAYERS = {"Qwen3-30B-A3B": 48, "GPT-OSS-20B": 24}
MEMORY_GIB = 139


def alone(record: str) -> list[dict[str, Any]]:
    """Results of this kind from parts that ran alone, in order of measurement."""
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    return [
        one["result"] | {"commit": one["env"]["git_commit"][:7]}
        for one in rows
        if one["config"]["record"] == record and one["config"].get("alone")
    ]


def whole(record: str) -> list[dict[str, Any]]:
    """The last result of each whole model and batch."""
    last = {
        (one["model"], one.get("batch")): one
        for one in alone(record)
        if WHOLE_LAYERS.get(one["model"]) == one["layers"]
    }
    return list(last.values())


def peak_rates() -> tuple[float, float]:
    """Bytes per second of the fastest copy, FLOP per second of the fastest GEMM."""
    found = alone("rates")
    copies = [one["copy_TB_s"]["best"] for one in found if isinstance(one["copy_TB_s"], dict)]
    return max(copies) * 1e12, max(one["gemm_TFLOP_s"] for one in found) * 1e12


def decode_fit(steps: list[dict[str, Any]]) -> tuple[float, float]:
    """Fixed seconds of a layer, and seconds per byte."""
    times_s = np.array([one["step_ms"] * 1e-3 for one in steps])
    features = np.array([[one["layers"], sum(one["bytes"].values())] for one in steps], dtype=float)
    scale = features.max(axis=0)
    found, _ = nnls(features / scale / times_s[:, None], np.ones(len(steps)))
    fixed_s, byte_s = found / scale
    return float(fixed_s), float(byte_s)


def deltas_fixed_s(byte_s: float) -> float:
    """Fixed seconds of a layer's deltas beside their bytes, mean over rounds with adapters."""
    rounds = [one for one in alone("zipf_adapters") if "step_ms" in one]
    base_ms = float(np.median([one["step_ms"] for one in rounds if one["arm"] == "base"]))
    found = [
        ((one["step_ms"] - base_ms) * 1e-3 - one["bytes"]["adapters"] * byte_s) / one["layers"]
        for one in rounds
        if one["arm"] != "base"
    ]
    return float(np.mean(found))


def profile() -> dict[str, Any]:
    """The file's content."""
    bytes_per_s, flop_per_s = peak_rates()
    steps, prefills = whole("decode"), whole("prefill")
    fixed_s, byte_s = decode_fit(steps)
    slowest = min(prefills, key=lambda one: one["of_gemm"])
    models = sorted(WHOLE_LAYERS)
    return {
        "name": "h200",
        "kind": "roofline",
        "about": "measured with this code on one NVIDIA H200 (docs/results/gpu.md); peak rates are the "
        "fastest "
        "copy and GEMM measured, not the data sheet's",
        "gpu": {
            "memory_gib": MEMORY_GIB,
            "instance_memory_share": 0.9,
            "server_memory_share": 0.92,
            "bytes_per_s": float(f"{bytes_per_s:.4g}"),
            "flop_per_s": float(f"{flop_per_s:.4g}"),
        },
        "efficiency": {
            "memory": round(1 / (byte_s * bytes_per_s), 3),
            "flop": round(slowest["of_gemm"], 3),
        },
        "fixed_us": {
            "attention": round(fixed_s * 1e6, 1),
            "compute": round(deltas_fixed_s(byte_s) * 1e6, 1),
        },
        "ran": {
            "decode": f"{' and '.join(models)} whole, on one GPU, 1 to 64 requests, random weights",
            "prefill": f"{' and '.join(models)} whole, 4 prompts of 2048 tokens",
            "adapters": "12 layers of Qwen3-30B-A3B, 64 adapters of rank 32, 64 requests",
        },
        "models_run": models,
        "sources": {
            "all": "bench/results/gpu.jsonl, parts that ran alone; python -m bench.gpu.device_profile",
            "memory_gib": "as the driver reports it (docs/results/gpu.md); not in the records",
            "shares": "choices, as of hopper96",
            "bytes_per_s, flop_per_s": "rates: fastest copy, fastest GEMM",
            "efficiency.memory, fixed_us.attention": f"decode: fitted to {len(steps)} steps of whole models",
            "efficiency.flop": f"prefill: the slower model's share of a GEMM, {slowest['model']} at "
            f"{slowest['commit']}, {slowest['TFLOP_s']:.0f} TFLOP/s",
            "fixed_us.compute": "zipf_adapters: step with adapters less the base model's and the adapters' "
            "bytes",
            "left out": "load_bytes_per_s (copies from host to device), net_bytes_per_s, stages of a LoRA "
            "Server: never measured",
        },
    }


if __name__ == "__main__":
    print(json.dumps(profile(), indent=2))
