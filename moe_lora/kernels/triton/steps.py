"""One function per kernel: workspace, grid and constants of its launch.

Legend: R rows, M modules of the site, S parts of the input width that are summed apart.
"""

from __future__ import annotations

from typing import Any

import torch

from . import configs
from .configs import Choice, Config
from .problem import Problem

_RANK_ROWS = 64
_COLUMNS = 64


def wgmma_shrink(problem: Problem, choice: Choice) -> torch.Tensor:
    """h of all rows: [2, M, R, h_width] of the model's dtype, hi and lo."""
    kernels, x = configs.kernels("wgmma_shrink"), problem.x
    aligned = x.shape[1] % 16 == 0
    rows, per_input = problem.segments.rows, problem.rows_per_input
    x = x.index_select(0, rows if per_input == 1 else rows // per_input)
    config = pipeline(problem.config("wgmma_shrink"), aligned)
    split_k, span = config["split_k"], _span(problem, choice)
    tiles, lanes = problem.segments.tiles(config["block_t"]), -(-problem.max_lora_rank // _RANK_ROWS)
    h = _workspace(problem, 2, x.dtype)
    target = h if split_k == 1 else _workspace(problem, split_k, torch.float32)
    max_items = problem.num_rows * problem.modules * split_k * lanes
    configs.start(
        kernels.wgmma_shrink,
        configs.num_programs(x.device, config, max_items),
        *(x, tiles, problem.tables, target, *span, problem.num_rows, lanes, x.shape[1], problem.h_width),
        MODULES=problem.modules,
        PARTS=2 if split_k == 1 else 1,
        INTERPRETED=configs.interpreted(),
        ALIGNED=aligned,
        WARP_SPECIALIZE=config["warp_specialize"],
        **_threads(config),
        BLOCK_T=config["block_t"],
        BLOCK_K=config["block_k"],
        SPLIT_K=split_k,
    )
    if split_k > 1:
        configs.start(
            kernels.join_splits,
            configs.num_programs(x.device, {"programs_per_sm": 8}, problem.num_rows * problem.modules),
            *(target, tiles, problem.tables, h, *span, problem.num_rows, problem.h_width),
            MODULES=problem.modules,
            BLOCK_T=config["block_t"],
            SPLIT_K=split_k,
            INTERPRETED=configs.interpreted(),
        )
    return h


def wgmma_expand(problem: Problem, choice: Choice, h: torch.Tensor, y: torch.Tensor, add: bool) -> None:
    """y += delta, or y = delta, from `wgmma_shrink`'s h."""
    aligned = all(width * y.element_size() % 16 == 0 for width in problem.out_widths)
    config = pipeline(problem.config("wgmma_expand"), aligned, overwrites=not add)
    tiles = problem.segments.tiles(config["block_t"])
    item_columns = _COLUMNS * config["blocks_per_item"]
    max_items = problem.num_rows * sum(-(-width // item_columns) for width in problem.out_widths)
    configs.start(
        configs.kernels("wgmma_expand").wgmma_expand,
        configs.num_programs(y.device, config, max_items),
        *(h, problem.segments.rows, tiles, problem.tables, y),
        *(*_span(problem, choice), problem.num_rows, problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        ADD=add,
        INTERPRETED=configs.interpreted(),
        ALIGNED=aligned,
        WARP_SPECIALIZE=config["warp_specialize"],
        **_threads(config),
        BLOCK_T=config["block_t"],
        BLOCKS_PER_ITEM=config["blocks_per_item"],
    )


def vector_shrink(problem: Problem, choice: Choice, kernel: str) -> torch.Tensor:
    """h of all rows in S parts: [S, M, R, h_width] fp32.  kernel: a baseline is launched without
    persistence."""
    config, segments, x = problem.config("vector_shrink"), problem.segments, problem.x
    rank = problem.padded_rank if kernel == "bgmv" else problem.max_lora_rank
    split_k, lanes = config["split_k"], -(-rank // config["block_r"])
    h = _workspace(problem, split_k, torch.float32)
    items = problem.num_rows * problem.modules * split_k * lanes
    configs.start(
        configs.kernels("vector").vector_shrink,
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
    problem: Problem, choice: Choice, kernel: str, h: torch.Tensor, y: torch.Tensor, add: bool
) -> None:
    """y += delta, or y = delta, from `vector_shrink`'s h."""
    config, segments = problem.config("vector_expand"), problem.segments
    items = problem.num_rows * sum(-(-width // config["block_c"]) for width in problem.out_widths)
    configs.start(
        configs.kernels("vector").vector_expand,
        configs.num_programs(y.device, config, items) if kernel == "sgmv" else max(1, items),
        *(h, segments.rows, segments.described, segments.count, problem.tables, y),
        *(*_span(problem, choice), problem.arena.numel(), problem.num_rows, problem.padded_rank),
        *(problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        SPLIT_K=h.shape[0],
        ADD=add,
        PADDED=kernel == "bgmv",
        INTERPRETED=configs.interpreted(),
        **_threads(config),
        BLOCK_R=config["block_r"],
        BLOCK_C=config["block_c"],
    )


def check_choice(problem: Problem, choice: Choice) -> None:
    """Raises ValueError if the algorithm cannot serve the dtype or the ranks of the class."""
    algorithm = choice.algorithm
    if algorithm != "vector" and problem.x.dtype == torch.float32:
        raise ValueError(f"algorithm={algorithm!r} takes bfloat16 or float16, x is float32; use 'vector'")


def _span(problem: Problem, choice: Choice) -> tuple[int, int, int, int]:
    """Which of the tables' entries a launch is about: slot_stride, table_base, min_rank, max_rank."""
    return *problem.entry_strides, choice.min_rank, choice.max_rank


def _workspace(problem: Problem, parts: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (parts, problem.modules, problem.num_rows, problem.h_width)
    return torch.empty(shape, dtype=dtype, device=problem.x.device)


def pipeline(config: Config, aligned: bool, overwrites: bool = True) -> Config:
    """The configuration as launched where rows are, or are not, multiples of 16 bytes.

    Only aligned rows can go by TMA, and only such loops be specialized.  Element-wise loads of odd rows need
    many registers: smaller steps and more threads keep them from spilling.
    """
    if aligned:
        # The consumers of a specialized loop repeat each other: adding to y would add twice.
        return config if overwrites else {**config, "warp_specialize": False}
    odd = {**config, "warp_specialize": False, "num_warps": 2 * config["num_warps"], "num_stages": 2}
    return {**odd, "block_k": 32} if "block_k" in config else odd


def _threads(config: Config) -> dict[str, Any]:
    return {
        "STAGES": config["num_stages"],
        "num_stages": config["num_stages"],
        "num_warps": config["num_warps"],
    }
