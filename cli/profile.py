# SPDX-License-Identifier: Apache-2.0
"""`moe-lora profile`."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config import EngineConfig

from .errors import user_errors
from .options import setting_options

if TYPE_CHECKING:
    from moe_lora.profiling.layer_times import LayerClock, LayerTimes

_BATCHES = tuple(2**power for power in range(9))


@setting_options(EngineConfig, "device", "num_threads", "load_format", "num_layers")
@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option("--max-batch", default=256, type=click.IntRange(2, 4096), help="Largest number of rows.")
@click.option("--lora-rank", default=16, type=click.IntRange(1, 512))
@click.option("--num-adapters", default=32, type=click.IntRange(min=1))
@click.option("--zipf", default=1.2, help="Popularity ~ 1 / place**ZIPF.")
@click.option("--context-tokens", default=512, type=click.IntRange(min=1))
@user_errors
def profile(model_dir: str, out: str, max_batch: int, **options: Any) -> None:
    """Time one layer of the model in MODEL_DIR: attention, experts, LoRA deltas, transfers.

    Each on one GPU (or, without any, on the CPU), not compiled, transfers through shared memory of this host.
    """
    from moe_lora.profiling.layer_times import LayerClock
    from moe_lora.report.results import check_targets, write_text

    check_targets(out=out)
    machine = {name: options.pop(name) for name in ("device", "num_threads", "load_format", "num_layers")}
    config = EngineConfig(model_dir=model_dir, eager=True, **machine)
    batches = (*(batch for batch in _BATCHES if batch < max_batch), max_batch)
    clock = LayerClock(config, batches, **options)
    memory_bytes = _memory_bytes(clock)
    content = _content(config, batches, clock, clock.measure(), options)
    content["gpu"] = {"memory_gib": memory_bytes / 2**30, **content["gpu"]}
    write_text(out, json.dumps(content, indent=1) + "\n")
    click.echo(f"profile: {out}")


def _content(
    config: EngineConfig,
    batches: tuple[int, ...],
    clock: LayerClock,
    times: LayerTimes,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The profile file's fields."""
    shape, name = clock.shape, Path(config.model_dir).resolve().name
    sizes = (
        *("hidden_size", "intermediate_size", "num_experts", "num_experts_per_token"),
        *("num_heads", "num_kv_heads", "head_dim"),
    )
    return {
        "name": f"{name} on {clock.device.type}",
        "kind": "tables",
        "about": "measured on this machine by moe-lora profile: one layer, not compiled, one process",
        "gpu": {
            "instance_memory_share": 0.9,
            "server_memory_share": 0.9,
            "load_bytes_per_s": times.load_bytes_per_s,
        },
        "taken_at": {
            "model": name,
            **{size: getattr(shape, size) for size in sizes},
            "lora_rank": options["lora_rank"],
            "instance_gpus": 1,
            "value_bytes": clock.dtype.itemsize,
            "weights": config.weights_name(),
            "context_tokens": options["context_tokens"],
        },
        "batches": list(batches),
        "server_us": {
            str(ep): {
                "receive": _micros(times.receive_s[ep]),
                "compute": _micros(times.compute_s[ep]),
                "send": _micros(times.send_s[ep]),
            }
            for ep in times.compute_s
        },
        "base_us": {"experts": _micros(times.experts_s), "attention": _micros(times.attention_s)},
        "sources": {
            "times": "medians measured by moe-lora profile, lowered where a larger batch was faster",
            "settings": ", ".join(f"{key}={value}" for key, value in options.items()),
            "memory": "all of the device's; the shares are assumed",
        },
    }


def _micros(times_s: list[float]) -> list[float]:
    """Microseconds, never falling with the batch."""
    lowest = list(accumulate(reversed(times_s), min))
    return [round(time_s * 1e6, 3) for time_s in reversed(lowest)]


def _memory_bytes(clock: LayerClock) -> int:
    if clock.device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(clock.device).total_memory
    from moe_lora.report.results import environment

    found = environment()["memory_bytes"]
    if found is None:
        raise ValueError("this system does not say how much memory it has, which the profile needs")
    return found
