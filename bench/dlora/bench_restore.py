# SPDX-License-Identifier: Apache-2.0
"""Two ways to restore weights' bits after a merge: the original bytes, or an exact residual.

    python -m bench.dlora.bench_restore --out bench/results/merge_restore.jsonl [--quick]

The model of `bench.harness.random_model`, one adapter on attention and experts, merged and unmerged whole,
both ways by turns.  bytes: the engine's way (`models.weight_merge`).  residual: unmerging computes
W' = round(W_a - scale B A) and adds the difference of bit patterns, W - W', kept in one byte, larger ones as
index and value.  After every cycle the weights must have their old bits.  A copy of the same bytes is the
ceiling.  rounding: the merge's change of deltas that are ever smaller beside the weights.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness.random_model import FULL, QUICK, write_adapter, write_model
from bench.harness.records import Recorder
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.local import point_slot
from moe_lora.models.loader import load_model
from moe_lora.models.weight_merge import HeldAdapter, WeightMerge

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
SHRINKS = (1, 4, 16, 64, 256)
Piece = tuple[int, int]


class ResidualMerge(WeightMerge):
    """Keeps, per merge, the residue of subtracting.  kept: its bytes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.residuals: dict[tuple[Piece, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """Differences in one byte; larger ones with their places."""

    @torch.inference_mode()
    def fold_in(self, piece: Piece, held: HeldAdapter) -> None:
        for entry, _, rows in self._parts(piece, held):
            original = rows.clone()
            b, a, scale = self._operands(piece, entry, held)
            rows.copy_(torch.addmm(rows.float(), b, a, alpha=scale))
            kind = _BITS[rows.dtype]
            missing = original.view(kind) - self._subtracted(piece, entry, rows, held).view(kind)
            small = missing.to(torch.int8)
            wide = (small.to(kind) != missing).view(-1).nonzero(as_tuple=True)[0]
            self.residuals[piece, entry] = small, wide.int(), missing.view(-1)[wide]
        self.merged[piece] = True

    @torch.inference_mode()
    def take_out(self, piece: Piece, held: HeldAdapter) -> None:
        for entry, _, rows in self._parts(piece, held):
            kind, (small, wide, values) = _BITS[rows.dtype], self.residuals.pop((piece, entry))
            missing = small.to(kind)
            missing.view(-1)[wide.long()] = values
            rows.view(kind).copy_(self._subtracted(piece, entry, rows, held).view(kind) + missing)
        self.merged[piece] = False

    def kept_bytes(self) -> int:
        return sum(part.nbytes for parts in self.residuals.values() for part in parts)

    def _subtracted(self, piece: Piece, entry: int, rows: torch.Tensor, held: HeldAdapter) -> torch.Tensor:
        b, a, scale = self._operands(piece, entry, held)
        return torch.addmm(rows.float(), b, a, alpha=-scale).to(rows.dtype)


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def for_all(change: Callable[[Piece, HeldAdapter], None], pieces: list[Piece], held: HeldAdapter) -> None:
    for piece in pieces:
        change(piece, held)


def held_adapter(folder: Path, model: Any, dtype: torch.dtype) -> HeldAdapter:
    """The adapter in memory of its own."""
    shape = model.spec.shape
    packed = read_adapter(folder, shape, dtype)
    offsets = [0]
    for layer in packed.layers:
        offsets.append(offsets[-1] + layer.nbytes)
    arena = torch.cat([layer.data.view(torch.uint8) for layer in packed.layers])
    slots = SlotTable(1, shape.num_layers, shape.num_entries, arena.device)
    point_slot(slots, 0, packed, offsets[:-1])
    return HeldAdapter(arena, slots, 0)


def measure(model_dir: Path, adapter_dir: Path, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Medians over rounds of merging and unmerging both ways, and their memory."""
    model = load_model(model_dir, dtype, torch.device("cpu"))
    held, sites = held_adapter(adapter_dir, model, dtype), frozenset(range(len(model.spec.shape.sites)))
    ways = {"bytes": WeightMerge(model), "residual": ResidualMerge(model)}
    checksum = ways["bytes"].checksum()
    pieces = ways["bytes"].pieces(held, sites)
    num_bytes = sum(map(ways["bytes"].num_bytes, pieces))
    times: dict[str, list[float]] = {}
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    kept = {}
    for number in range(rounds + 1):  # the first one keeps the originals, and is no measurement
        for name, way in ways.items():
            merge_s = timed(partial(for_all, way.fold_in, pieces, held))
            kept[name] = way.kept_bytes()
            take_out_s = timed(partial(for_all, way.take_out, pieces, held))
            assert way.checksum() == checksum, name
            if number:
                times.setdefault(f"{name}_merge_s", []).append(merge_s)
                times.setdefault(f"{name}_take_out_s", []).append(take_out_s)
            else:
                times[f"{name}_first_merge_s"] = [merge_s]
        times.setdefault("copy_s", []).append(timed(lambda: target.copy_(source)))
    rounding = {}
    for shrink in SHRINKS:
        held = HeldAdapter(held.arena, held.slots, held.slot)
        found = [one for piece in pieces for one in ways["bytes"].rounding(piece, held)]
        rounding[f"1/{shrink}"] = max(math.sqrt(lost / delta) for _, lost, delta in found)
        held.slots.scale /= 4
    return {
        "changed_bytes": num_bytes,
        **{f"{name}_kept_bytes": size for name, size in kept.items()},
        **{name: statistics.median(values) for name, values in times.items()},
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "rounding": rounding,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lora-rank", type=int, default=16)
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    record = Recorder(args.out)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_model(Path(folder) / "base", size)
        adapter_dir = write_adapter(
            Path(folder) / "adapter", size, model_dir, args.lora_rank, experts=True, seed=1
        )
        for dtype in (torch.bfloat16, torch.float32):
            result = measure(model_dir, adapter_dir, dtype, args.rounds)
            record(
                {
                    "model": size.describe(),
                    "dtype": str(dtype),
                    "rounds": args.rounds,
                    "lora_rank": args.lora_rank,
                },
                result,
            )
            for way in ("bytes", "residual"):
                merge_s, take_out_s = result[f"{way}_merge_s"], result[f"{way}_take_out_s"]
                share = result[f"{way}_kept_bytes"] / result["changed_bytes"]
                print(f"{dtype} {way:8}: in {merge_s:.3f} s, out {take_out_s:.3f} s, keeps {share:.0%}")
            print(f"{dtype} copy {result['copy_s']:.3f} s; rounding {result['rounding']}")


if __name__ == "__main__":
    main()
