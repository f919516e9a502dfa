# SPDX-License-Identifier: Apache-2.0
"""Cold loads of a checkpoint of 8 GB with the tensors' names and number, and the shards, of Qwen3-30B-A3B.

    python -m bench.engine.bench_load --folder /tmp/load --out bench/results/load.jsonl [--quick]

In bf16 and in fp8 blocks.  Each round reads the files plainly, and loads the checkpoint in a new process.
The order is reversed in every second round.  The page cache drops the files before each.  `share_of_read` is
the time of the read over the time of the load.  `peak_over_weights` is the highest resident memory of the
process, with imports and mapped files, over the bytes of the model's weights.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import torch

from bench.harness.interleave import Contestant, interleave, ratio
from bench.harness.records import Recorder
from bench.harness.tables import table

MIN_SHARE, MAX_PEAK = 0.7, 1.1
BLOCK = 128
NUM_SHARDS = 16
_CHUNK_BYTES = 1 << 24
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model: those of Qwen3-30B-A3B, but for narrower matrices."""

    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int = 48
    num_experts: int = 128
    vocab_size: int = 151936


FULL = {
    "bfloat16": Size(hidden_size=1280, moe_intermediate_size=128),
    "fp8": Size(hidden_size=1408, moe_intermediate_size=256),
}
QUICK = dict.fromkeys(
    FULL,
    Size(hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, num_experts=8, vocab_size=1000),
)


def shapes(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = size.hidden_size, size.moe_intermediate_size
    yield "model.embed_tokens.weight", (size.vocab_size, hidden)
    for layer in range(size.num_hidden_layers):
        front = f"model.layers.{layer}."
        for name, width in (("q", 4096), ("k", 512), ("v", 512)):
            yield f"{front}self_attn.{name}_proj.weight", (width, hidden)
        yield f"{front}self_attn.o_proj.weight", (hidden, 4096)
        yield from ((f"{front}self_attn.{name}_norm.weight", (128,)) for name in "qk")
        yield f"{front}mlp.gate.weight", (size.num_experts, hidden)
        for expert in range(size.num_experts):
            for name in ("gate", "up"):
                yield f"{front}mlp.experts.{expert}.{name}_proj.weight", (inner, hidden)
            yield f"{front}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        for name in ("input", "post_attention"):
            yield f"{front}{name}_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size.vocab_size, hidden)


def _tensors(size: Size, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values: views of one random block, as only bytes count here."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16)
    coded = plain.float().mul_(1000).to(torch.float8_e4m3fn)
    for name, shape in shapes(size):
        is_coded = dtype == "fp8" and name.endswith("_proj.weight")
        block = coded if is_coded else plain
        count = torch.Size(shape).numel()
        copies = -(-count // len(block))
        yield name, (block[:count].clone() if copies == 1 else block.repeat(copies)[:count]).view(shape)
        if is_coded:
            yield f"{name}_scale_inv", torch.full([-(-n // BLOCK) for n in shape], 0.001)


def write_checkpoint(folder: Path, size: Size, dtype: str) -> list[Path]:
    """Write config.json, an index and the shards, some layers each; returns the shards."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    quantised = {"quantization_config": _FP8} if dtype == "fp8" else {}
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **vars(size), **quantised}))
    num_shards = min(NUM_SHARDS, size.num_hidden_layers)
    places: dict[str, str] = {}

    def shard_of(tensor: tuple[str, torch.Tensor]) -> int:
        words = tensor[0].split(".")
        if words[1] != "layers":
            return 0 if words[1] == "embed_tokens" else num_shards - 1
        return int(words[2]) * num_shards // size.num_hidden_layers

    for shard, part in groupby(_tensors(size, dtype), shard_of):
        name, held = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors", dict(part)
        save_file(held, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(held, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return sorted(folder.glob("*.safetensors"))


def forget(paths: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[Path]) -> float:
    """Seconds of a cold and plain read of the files, in order, into one buffer."""
    forget(paths)
    buffer = bytearray(_CHUNK_BYTES)
    start_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start_s


_LOAD = """
import json, resource, sys, time
from pathlib import Path
import torch
from moe_lora.models.loader import load_model
start_s = time.perf_counter()
model = load_model(Path(sys.argv[1]), torch.bfloat16, torch.device("cpu"))
took_s = time.perf_counter() - start_s
weights = sum(held.nbytes for held in (*model.parameters(), *model.buffers()))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"load_s": took_s, "weight_bytes": weights, "peak_bytes": peak}))
"""


@dataclass
class Loads:
    """Cold loads, each in a process of its own.  found: of each load, in order."""

    folder: Path
    paths: list[Path]
    found: list[dict[str, Any]]

    def __call__(self, _num_steps: int) -> float:
        forget(self.paths)
        command = [sys.executable, "-c", _LOAD, str(self.folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        self.found.append(json.loads(done.stdout))
        return float(self.found[-1]["load_s"])


def measured(folder: Path, size: Size, dtype: str, num_rounds: int) -> dict[str, Any]:
    """The result of one dtype; the checkpoint in folder, earlier or new, is deleted at the end."""
    try:
        paths = sorted(folder.glob("*.safetensors")) or write_checkpoint(folder, size, dtype)
        loads = Loads(folder, paths, [])
        reads: Contestant = lambda _: read(paths)  # noqa: E731
        times = interleave({"read": (reads, 1, num_rounds), "load": (loads, 1, num_rounds)}, num_rounds)
        num_bytes = sum(path.stat().st_size for path in paths)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    weights, peak = (max(one[key] for one in loads.found) for key in ("weight_bytes", "peak_bytes"))
    return {
        "file_bytes": num_bytes,
        "num_shards": len(paths),
        "weight_bytes": weights,
        "peak_bytes": peak,
        "peak_over_weights": peak / weights,
        "share_of_read": ratio(times["read"], times["load"]),
        **{f"{name}_s": statistics.median(found) for name, found in times.items()},
    }


def row(dtype: str, result: dict[str, Any]) -> dict[str, str]:
    """A line of the table."""
    share = result["share_of_read"]
    return {
        "checkpoint": dtype,
        "GB": f"{result['file_bytes'] / 1e9:.2f}",
        "read s": f"{result['read_s']:.1f}",
        "load s": f"{result['load_s']:.1f}",
        "share of the read": f"{share['median']:.2f} ({share['min']:.2f} to {share['max']:.2f})",
        f">= {MIN_SHARE}": "met" if share["median"] >= MIN_SHARE else "MISSED",
        "peak / weights": f"{result['peak_over_weights']:.3f}",
        f"<= {MAX_PEAK}": "met" if result["peak_over_weights"] <= MAX_PEAK else "MISSED",
    }


@click.command()
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="For the files, 9 GB at a time."
)
@click.option("--out", type=click.Path(), default=None, help="File of the records.")
@click.option("--rounds", default=7, show_default=True, help="Reads and loads of each checkpoint.")
@click.option("--quick", is_flag=True, help="A few megabytes.")
def main(folder: Path, out: str | None, rounds: int, quick: bool) -> None:
    """Measure loads of a checkpoint beside plain reads of its files."""
    record, rows = Recorder(out), []
    for dtype, size in (QUICK if quick else FULL).items():
        result = measured(folder / dtype, size, dtype, rounds)
        record({"checkpoint": dtype, "quick": quick, "num_rounds": rounds, **vars(size)}, result)
        rows.append(row(dtype, result))
    click.echo(table(rows, "Cold loads beside cold reads"))


if __name__ == "__main__":
    main()
