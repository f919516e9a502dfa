# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.gpu.aot.aot`: compile every kernel of every table for sm_90a, without a GPU.

Every kernel with every dtype, design and size of its constants at least once.  `--few`: every kernel with
every dtype and required instruction.  `--all`: every launch, that is each configuration with rows on and off
multiples of 16 bytes, adding and overwriting, in bf16 for sites of one, two and three modules, in further
dtypes for sites of two.
Prints each result and its bytes in flight.  Exit status 1 if SGMV lost wgmma, its 16-byte copies, TMA or a
buffer, or for spills and exceeded SM limits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from bench.kernels.lora_spaces import config_space
from moe_lora.core.shape import Site
from moe_lora.kernels.operands import AttentionOperands, KvLayout, Rotation, SlotTable, StepTables, Zeros
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.attention import triton_attention
from moe_lora.kernels.triton.lora import steps
from moe_lora.kernels.triton.lora.problem import Problem
from moe_lora.kernels.triton.lora.segments import Segments, build_segments, unsorted_rows

from .aot_check import check
from .sass import COPIES, MARKS, TENSOR_CORES, TMA

_ROWS, _RANK, _TOP_K = 2, 64, 8
_DTYPE_OF = {name: dtype for dtype, name in configs.DTYPE_NAMES.items()}
_HOPPER_SMS = 132
_WIDTHS = {True: 1024, False: 1001}
"""Widths of a site with rows on, or off, multiples of 16 elements."""
_IN_WIDTHS = {True: (1024, 2880, 3072, 4096), False: (1001, 4004)}
"""Input widths with one part to four by the default table; GPT-OSS's is no whole steps."""
_ALL_RANKS = configs.Choice(algorithm="any")
_MODULES = {"bf16": (1, 2, 3), "fp16": (2,), "fp32": (2,)}


@dataclass(frozen=True)
class Pointer:
    """A compilation's knowledge of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, kw_only=True)
class Build:
    """One compilation: a kernel, by module and name, and its launch; see `_known`.

    rings: required loop buffers, as (how many, rows, columns) each.
    """

    module: str
    kernel: str
    operands: tuple[Any, ...]
    meta: dict[str, Any]
    required: tuple[str, ...]
    dtype: str
    label: str
    rings: tuple[tuple[int, int, int], ...] = ()
    programs_per_sm: int = 1


def _known(operand: Any) -> Any:
    """The operand, or the tuple of operands, with descriptions in place of tensors."""
    if isinstance(operand, torch.Tensor):
        return Pointer(operand.dtype, operand.data_ptr() % 16)
    if isinstance(operand, tuple):
        known = map(_known, operand)
        return type(operand)(*known) if hasattr(operand, "_fields") else tuple(known)
    return operand


@contextmanager
def launches_recorded(dtype: str = "", label: str = "") -> Iterator[list[Build]]:
    """Builds of the context's launches, without runs: each also with an early start."""
    found: list[Build] = []

    def record(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
        required: tuple[str, ...] = ()
        if {"GATED", "PACKED", "TMA"} & meta.keys() and operands[0].dtype != torch.float32:
            required = (TENSOR_CORES, TMA) if meta.get("TMA") else (TENSOR_CORES,)
        for early in (False, True):
            build = Build(
                module=kernel.fn.__module__,
                kernel=kernel.fn.__name__,
                operands=_known(operands),
                meta=meta | configs.when_it_begins(kernel, early),
                required=required,
                dtype=dtype or configs.DTYPE_NAMES.get(operands[0].dtype, ""),
                label=label,
            )
            if build not in found:
                found.append(build)

    with patch.object(configs, "start", record):
        yield found


def table_builds() -> list[Build]:
    """Every kernel with every table configuration, and kernels without a table."""
    from moe_lora.kernels.triton import sampling, signals  # needs Triton

    from .launches import launch_exchange, launch_experts, launch_norms, launch_quantised

    with launches_recorded() as builds:
        for top_k, zeros in itertools.product((None, _TOP_K), (None, Zeros())):
            _segments(top_k, zeros).tiles(64)
        word = torch.zeros(8, dtype=torch.int64)
        signals.launch_ask(word, word, word, (0,) * 5)
        signals.launch_wait(word, word)
        launch_exchange(word)
        sampling.draw(torch.empty(2, 151936), torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int64))
        for of_model, launch in itertools.product(
            configs.DTYPE_NAMES, (launch_experts, launch_norms, launch_quantised)
        ):
            launch(of_model)
        with patch.object(configs, "_INTERPRETED_SMS", _HOPPER_SMS):  # single rows fill the device, or not
            for of_model in configs.DTYPE_NAMES:
                launch_experts(of_model)
    for path in sorted(configs.CONFIG_DIR.glob("*.json")):
        table = configs.load_table(path.stem)
        for entry in table.entries:
            dtypes = configs.DTYPES if entry.kernel.startswith("vector") else configs.DTYPES[:2]
            for dtype in dtypes if entry.dtype is None else (entry.dtype,):
                widths = (entry.in_features or 0, entry.out_features or 0)
                phase = entry.phase or configs.PHASES[0]
                split_k = table.config("vector_shrink", dtype, phase, *widths)["split_k"]
                for modules in _MODULES[dtype]:
                    builds += config_builds(entry.kernel, entry.config, dtype, modules, split_k)
    builds += attention_builds()
    return [build for i, build in enumerate(builds) if build not in builds[:i]]


def deciding(builds: list[Build], *, constants: bool = True) -> list[Build]:
    """A few builds that cover each kernel, dtype and required instruction, but not all pairs.

    constants: cover each constant value and operand kind too.
    """
    left = [(build, _traits(build, constants)) for build in builds]
    missing = set[tuple[Any, ...]]().union(*(traits for _, traits in left))
    found = []
    while missing:
        build, traits = max(left, key=lambda one: len(one[1] & missing))
        found.append(build)
        missing -= traits
    return found


def _traits(build: Build, constants: bool) -> set[tuple[Any, ...]]:
    traits: set[tuple[Any, ...]] = {("required", build.required)}
    if constants:
        traits |= {(i, one) for i, one in enumerate(build.operands) if isinstance(one, Pointer)}
        traits |= set(build.meta.items())
    return {(build.module, build.kernel, build.dtype, *trait) for trait in traits}


def config_builds(kernel: str, config: configs.Config, dtype: str, modules: int, split_k: int) -> list[Build]:
    """Launches of one configuration.

    split_k: of `vector_shrink`, for `vector_expand`.
    """
    label = " ".join(f"{name}={int(value)}" for name, value in config.items())
    builds: list[Build] = []
    for aligned in (True, False) if kernel.startswith("wgmma") else (True,):
        with configs.override(kernel, config), launches_recorded(dtype, label) as launched:
            _launch(kernel, dtype, modules, _WIDTHS[aligned], split_k)
        for build in launched:
            if kernel.startswith("wgmma") and aligned and build.kernel == kernel:
                build = _pipelined(build)
            builds.append(replace(build, programs_per_sm=config["programs_per_sm"]))
    return [build for build in builds if build.kernel != "cut_tiles"]


def _launch(kernel: str, dtype: str, modules: int, width: int, split_k: int) -> None:
    """Launch a kernel in every way of a site of this width."""
    problem, y, total = _problem(dtype, modules, width)
    high_rank = replace(problem, max_lora_rank=2 * _RANK)
    added = ((y, True, False), (total, True, False), (total, True, True))
    if kernel == "wgmma_shrink":
        for in_width in _IN_WIDTHS[width % 16 == 0]:
            steps.wgmma_shrink(_problem(dtype, modules, width, in_width)[0], _ALL_RANKS)
    elif kernel == "vector_shrink":
        for walk in ("sgmv", "bgmv"):
            steps.vector_shrink(problem, _ALL_RANKS, walk)
    elif kernel == "wgmma_expand":
        h = torch.empty(len(_IN_WIDTHS[True]), modules, _ROWS, problem.h_width)
        for out, add, subtract in (*added, (y, False, False)):
            steps.wgmma_expand(problem, _ALL_RANKS, h[:1], out, add, subtract)
        for parts in range(1, len(h) + 1):
            for one in (problem, high_rank):
                steps.wgmma_expand(one, _ALL_RANKS, h[:parts], y, True)
    else:
        h = torch.empty(split_k, modules, _ROWS, problem.h_width)
        for (out, add, subtract), walk in itertools.product((*added, (y, False, False)), ("sgmv", "bgmv")):
            steps.vector_expand(problem, _ALL_RANKS, walk, h, out, add, subtract)


def _pipelined(build: Build) -> Build:
    """The build, with weights and x required through all buffers, by 16 bytes or TMA."""
    meta = build.meta
    stages = int(meta.get("STAGES", 0))
    rings: list[tuple[int, int, int]] = []
    if "BLOCK_K" in meta:
        rings += [(stages, rows, meta["BLOCK_K"]) for rows in (64, meta["BLOCK_T"])]
    if "BLOCK_C" in meta:
        rings += [(stages, 64, meta["BLOCK_C"])]
    required = build.required if meta.get("TMA") else (*build.required, COPIES)
    return replace(build, required=required, rings=tuple(rings))


_FURTHER_HEADS = ((80, 1), (96, 1), (256, 2), (256, 8), (512, 8))
"""Sizes and groups of further models; 512: of layers with global attention."""


def attention_builds() -> list[Build]:
    """Writing K and V, decode with parts, tiles of prompts: head sizes and groups
    in bf16, one in other dtypes.
    """
    cases = [
        ("bf16", head_dim, group, plain)
        for head_dim, group, plain in itertools.product((64, 128), (1, 4, 5, 8), (True, False))
    ]
    cases += [
        ("bf16", head_dim, group, plain)
        for (head_dim, group), plain in itertools.product(_FURTHER_HEADS, (True, False))
    ]
    cases += [(dtype, 128, 8, plain) for dtype, plain in itertools.product(("fp16", "fp32"), (True, False))]
    builds: list[Build] = []
    for dtype, head_dim, group, plain in cases:
        operands = _attention(_DTYPE_OF[dtype], head_dim, group, plain)
        label = f"head_dim={head_dim} group={group}{'' if plain else ' window, sinks'}"
        with launches_recorded(dtype, label) as launched:
            for rows in ((1, 1), (2, 2)):
                start = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
                given = operands._replace(step=replace(operands.step, query_start=start))
                for rotation in _rotations(given.q):
                    triton_attention.launch(given, given.q, rotation)
        builds += [
            replace(b, required=(TENSOR_CORES,)) if b.meta.get("BLOCK_M", 0) >= 64 else b for b in launched
        ]
    return [build for i, build in enumerate(builds) if build not in builds[:i]]


def _attention(dtype: torch.dtype, head_dim: int, group: int, plain: bool) -> AttentionOperands:
    """Operands of two sequences of several parts.  plain: without window and sinks."""
    num_kv_heads = 2
    layout = KvLayout(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)
    length = 4 * triton_attention.PART_TOKENS
    step = StepTables(
        query_start=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.full((2,), length, dtype=torch.int32),
        block_tables=torch.zeros(2, length // 16, dtype=torch.int32),
    )
    q, k, v = (torch.empty(4, n, head_dim, dtype=dtype) for n in (group * num_kv_heads, *[num_kv_heads] * 2))
    sinks = None if plain else torch.empty(group * num_kv_heads, dtype=dtype)
    window = 0 if plain else 2 * triton_attention.PART_TOKENS
    arena = torch.empty(layout.page_bytes, dtype=torch.uint8)
    return AttentionOperands(q, k, v, sinks, 0.125, window, 0, step, layout, arena)


def _rotations(q: torch.Tensor) -> list[Rotation | None]:
    """None, and with norms, clamped, and neither."""
    angles, weight = torch.empty(q.shape[0], q.shape[2] // 2), torch.empty(q.shape[2], dtype=q.dtype)
    norms = ((weight, None), (None, 8.0), (None, None))
    return [None, *(Rotation(angles, angles, one, one, 1e-6, clip) for one, clip in norms)]


def _segments(top_k: int | None, zeros: Zeros | None) -> Segments:
    token_slots = torch.zeros(_ROWS, dtype=torch.int32)
    ids = None if top_k is None else torch.zeros(_ROWS, top_k, dtype=torch.int32)
    return build_segments(token_slots, ids, 5, 3, 64, zeros)


def _problem(
    dtype: str, modules: int, width: int, in_width: int | None = None
) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """Operands of a dense site of `modules` modules, its output, and an fp32 output.

    width: of its modules, and by default of its input.
    """
    in_width = in_width or width
    of_model = _DTYPE_OF[dtype]
    site = Site(
        name="aot",
        modules=("module",) * modules,
        in_features=in_width,
        out_features=(width,) * modules,
        num_experts=0,
        entry_base=0,
    )
    problem = Problem(
        x=torch.empty(_ROWS, in_width, dtype=of_model),
        site=site,
        layer=0,
        token_slots=torch.zeros(_ROWS, dtype=torch.int32),
        slots=SlotTable(1, 1, modules, torch.device("cpu")),
        arena=torch.empty(1 << 40, dtype=torch.uint8, device="meta"),
        segments=unsorted_rows(torch.zeros(_ROWS, dtype=torch.int32), None, num_slots=1, num_experts=0),
        decode=True,
        max_lora_rank=_RANK,
        padded_rank=_RANK,
    )
    skipped = width % 16  # an output of odd rows begins anywhere
    columns = skipped + modules * width
    y, total = (torch.empty(_ROWS, columns, dtype=one)[:, skipped:] for one in (of_model, torch.float32))
    return problem, y, total


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="compilations at a time (default 2)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="compile all that is launched, some minutes")
    which.add_argument(
        "--few", action="store_true", help="each kernel with each dtype and required instruction"
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="leave what is compiled there, to be TRITON_CACHE_DIR beside a GPU"
    )
    parser.add_argument(
        "--space", metavar="KERNEL", help="compile this kernel's whole space instead, in bf16"
    )
    arguments = parser.parse_args()
    if arguments.cache:
        os.environ["TRITON_CACHE_DIR"] = arguments.cache
    builds = table_builds()
    if not arguments.all:
        builds = deciding(builds, constants=not arguments.few)
    if arguments.space:
        kernel, table = arguments.space, configs.load_table(configs.FALLBACK)
        split_of_default = table.config("vector_shrink", "bf16", "decode", 0, 0)["split_k"]
        builds = [
            build
            for config in config_space(kernel)
            for build in config_builds(kernel, config, "bf16", 2, split_of_default)
        ]
    wrong = check(builds, arguments.processes)
    if wrong:
        print(
            f"\n{len(wrong)} of {len(builds)} kernels are not what they should be:",
            *wrong,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    print(
        f"\n{len(builds)} kernels compile for sm_90a without spills; SGMV has {' '.join(MARKS)} where meant "
        "and KB/SM in flight"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
