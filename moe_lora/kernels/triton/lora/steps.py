# SPDX-License-Identifier: Apache-2.0
"""A function per kernel: workspace, grid and constants of a launch.  Legend: see `wgmma_shrink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import Choice, Config

from .problem import Problem, config_of

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

_TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16)
_RANK_ROWS = 64
_ALIGNED = 16
"""Rows of multiples of this width, in elements, are 16-byte aligned for Triton."""


def wgmma_shrink(problem: Problem, choice: Choice) -> torch.Tensor:
    """h of all rows: [S, M, R, h_width] fp32, undefined from a row's rank on."""
    x, rows, width = problem.x, problem.segments.rows, problem.x.shape[1]
    config = pipeline(problem.config("wgmma_shrink"), width % _ALIGNED == 0)
    split_k = num_parts(config, width)
    tiles, lanes = problem.segments.tiles(config["block_t"]), -(-problem.max_lora_rank // _RANK_ROWS)
    h = _workspace(problem, split_k)
    max_items = problem.num_rows * problem.modules * split_k * lanes
    configs.start(
        configs.kernels("lora.wgmma_shrink").wgmma_shrink,
        configs.num_programs(x.device, config, max_items),
        *(x, rows, tiles, problem.tables, h, *_span(problem, choice)),
        *(problem.num_rows, lanes, width, x.stride(0), problem.h_width),
        X_DIVISOR=problem.rows_per_input,
        MODULES=problem.modules,
        TMA=config["tma"],
        EVEN=width % (config["block_k"] * split_k) == 0,
        INTERPRETED=configs.interpreted(),
        **_threads(config),
        BLOCK_T=config["block_t"],
        BLOCK_K=config["block_k"],
        SPLIT_K=split_k,
    )
    return h


def wgmma_expand(
    problem: Problem, choice: Choice, h: torch.Tensor, y: torch.Tensor, add: bool, subtract: bool = False
) -> None:
    """y += delta, y -= delta, or y = delta, from `wgmma_shrink`'s h."""
    x, config = problem.x, _expand_config(problem)
    max_items = problem.num_rows * _column_groups(problem, config)
    configs.start(
        configs.kernels("lora.wgmma_expand").wgmma_expand,
        configs.num_programs(y.device, config, max_items),
        *(x, h, problem.segments.rows, problem.segments.tiles(config["block_t"]), problem.tables, y),
        *(*_span(problem, choice), problem.num_rows, problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        SPLIT_K=h.shape[0],
        ONE_LANE=problem.max_lora_rank <= _RANK_ROWS,
        ADD=add,
        SUBTRACT=subtract,
        TMA=config["tma"],
        INTERPRETED=configs.interpreted(),
        **_threads(config),
        BLOCK_T=config["block_t"],
        BLOCK_C=config["block_c"],
        BLOCKS_PER_ITEM=config["blocks_per_item"],
    )


def tile_rows(x: torch.Tensor, site: Site, decode: bool) -> int:
    """Rows of `wgmma_shrink`'s tiles; 0 for an unsupported dtype."""
    return config_of("wgmma_shrink", x, site, decode)["block_t"] if x.dtype in _TENSOR_CORE_DTYPES else 0


def _expand_config(problem: Problem) -> Config:
    aligned = all(width % _ALIGNED == 0 for width in problem.out_widths)
    return pipeline(problem.config("wgmma_expand"), aligned)


def num_parts(config: Config, width: int) -> int:
    """S of `wgmma_shrink` at an input of this width."""
    return max(1, min(config["split_k"], width // config["part_k"]))


def _column_groups(problem: Problem, config: Config) -> int:
    columns = config["block_c"] * config["blocks_per_item"]
    return sum(-(-width // columns) for width in problem.out_widths)


def vector_shrink(problem: Problem, choice: Choice, kernel: str) -> torch.Tensor:
    """h of all rows: [S, M, R, h_width] fp32; baselines launch without persistence."""
    config, segments, x = problem.config("vector_shrink"), problem.segments, problem.x
    rank = problem.padded_rank if kernel == "bgmv" else problem.max_lora_rank
    split_k, lanes = config["split_k"], -(-rank // config["block_r"])
    h = _workspace(problem, split_k)
    items = problem.num_rows * problem.modules * split_k * lanes
    configs.start(
        configs.kernels("lora.vector").vector_shrink,
        configs.num_programs(x.device, config, items) if kernel == "sgmv" else max(1, items),
        *(x, segments.rows, segments.described, segments.count, problem.tables, h),
        *(*_span(problem, choice), problem.arena.numel(), problem.num_rows),
        *(lanes, x.shape[1], x.stride(0), problem.h_width),
        X_DIVISOR=problem.rows_per_input,
        MODULES=problem.modules,
        PADDED=kernel == "bgmv",
        **_threads(config),
        BLOCK_R=config["block_r"],
        BLOCK_K=config["block_k"],
        SPLIT_K=split_k,
    )
    return h


def vector_expand(
    problem: Problem,
    choice: Choice,
    kernel: str,
    h: torch.Tensor,
    y: torch.Tensor,
    add: bool,
    subtract: bool = False,
) -> None:
    """y += delta, y -= delta, or y = delta, from `vector_shrink`'s h."""
    config, segments = problem.config("vector_expand"), problem.segments
    items = problem.num_rows * sum(-(-width // config["block_c"]) for width in problem.out_widths)
    configs.start(
        configs.kernels("lora.vector").vector_expand,
        configs.num_programs(y.device, config, items) if kernel == "sgmv" else max(1, items),
        *(problem.x, h, segments.rows, segments.described, segments.count, problem.tables, y),
        *(*_span(problem, choice), problem.arena.numel(), problem.num_rows, problem.padded_rank),
        *(problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        SPLIT_K=h.shape[0],
        ADD=add,
        SUBTRACT=subtract,
        PADDED=kernel == "bgmv",
        INTERPRETED=configs.interpreted(),
        **_threads(config),
        BLOCK_R=config["block_r"],
        BLOCK_C=config["block_c"],
    )


def check_choice(problem: Problem, choice: Choice) -> None:
    """Raise ValueError if the algorithm cannot serve the dtype."""
    algorithm = choice.algorithm
    if algorithm != "vector" and problem.x.dtype == torch.float32:
        raise ValueError(f"algorithm={algorithm!r} takes bfloat16 or float16, x is float32; use 'vector'")


def _span(problem: Problem, choice: Choice) -> tuple[int, int, int, int]:
    return *problem.entry_strides, choice.min_rank, choice.max_rank


def _workspace(problem: Problem, parts: int) -> torch.Tensor:
    shape = (parts, problem.modules, problem.num_rows, problem.h_width)
    return torch.empty(shape, dtype=torch.float32, device=problem.x.device)


def pipeline(config: Config, aligned: bool) -> Config:
    """The configuration for rows aligned, or not, to 16 elements.

    Only aligned rows can use TMA.  Element-wise loads need many registers: small steps, more threads.
    """
    if aligned:
        return config
    odd = {**config, "tma": False, "num_warps": 2 * config["num_warps"], "num_stages": 1}
    return {**odd, "block_k": 32} if "block_k" in config else {**odd, "block_c": 64}


def _threads(config: Config) -> dict[str, Any]:
    return {
        "STAGES": config["num_stages"],
        "num_stages": config["num_stages"],
        "num_warps": config["num_warps"],
    }
