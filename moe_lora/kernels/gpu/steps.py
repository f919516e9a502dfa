"""One function per kernel: workspace, grid and constants of its launch.

Legend: R rows, M modules of the site, S parts of the input width that are summed apart.
"""

from __future__ import annotations

from typing import Any

import torch

from . import launch
from .configs import Choice
from .problem import Problem

_RANK_ROWS = 64
_COLUMNS = 64


def wgmma_shrink(problem: Problem, choice: Choice) -> torch.Tensor:
    """h of all rows: [2, M, R, h_width] of the model's dtype (hi and lo), or [1, ...] fp32."""
    kernels, config, x = launch.kernels("wgmma"), problem.config("wgmma_shrink"), problem.x
    parts, split_k, slots = _num_parts(problem), config["split_k"], problem.slots
    tiles, lanes = problem.segments.tiles(config["block_t"]), -(-problem.max_lora_rank // _RANK_ROWS)
    h = _workspace(problem, parts, x.dtype)
    target = h if split_k == 1 else _workspace(problem, split_k, torch.float32)
    aligned = x.shape[1] % 16 == 0 and x.stride(0) % 16 == 0 and _aligned(x, problem.arena)
    max_items = problem.num_rows * problem.modules * split_k * lanes
    launch.start(
        kernels.wgmma_shrink,
        launch.num_programs(x.device, config, max_items),
        *(x, problem.segments.rows, tiles.table, tiles.count, slots.a_offset, slots.lora_rank, problem.arena),
        *(target, *problem.entry_strides, choice.min_rank, choice.max_rank, lanes),
        *(problem.num_rows, x.shape[1], x.stride(0), problem.h_width),
        X_DIVISOR=problem.rows_per_input,
        MODULES=problem.modules,
        PARTS=parts if split_k == 1 else 1,
        UPCAST=launch.interpreted(),
        **_pipeline(config, aligned),
        BLOCK_T=config["block_t"],
        BLOCK_K=config["block_k"],
        SPLIT_K=split_k,
    )
    if split_k > 1:
        launch.start(
            kernels.join_splits,
            launch.num_programs(x.device, {"programs_per_sm": 8}, problem.num_rows * problem.modules),
            *(target, tiles.table, tiles.count, slots.a_offset, slots.lora_rank, h, *problem.entry_strides),
            *(choice.min_rank, choice.max_rank, problem.num_rows, problem.h_width),
            MODULES=problem.modules,
            PARTS=parts,
            BLOCK_T=config["block_t"],
            SPLIT_K=split_k,
        )
    return h


def wgmma_expand(problem: Problem, choice: Choice, h: torch.Tensor, y: torch.Tensor, add: bool) -> None:
    """y += delta, or y = delta, from `wgmma_shrink`'s h."""
    config, slots = problem.config("wgmma_expand"), problem.slots
    tiles = problem.segments.tiles(config["block_t"])
    item_columns = _COLUMNS * config["blocks_per_item"]
    max_items = problem.num_rows * sum(-(-width // item_columns) for width in problem.out_widths)
    aligned = all(width * y.element_size() % 16 == 0 for width in problem.out_widths) and _aligned(
        problem.arena
    )
    launch.start(
        launch.kernels("wgmma").wgmma_expand,
        launch.num_programs(y.device, config, max_items),
        *(
            h,
            problem.segments.rows,
            tiles.table,
            tiles.count,
            slots.a_offset,
            slots.b_offset,
            slots.lora_rank,
        ),
        *(slots.scale, problem.arena, y, *problem.entry_strides, choice.min_rank, choice.max_rank),
        *(problem.num_rows, *problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        PARTS=_num_parts(problem),
        ADD=add,
        UPCAST=launch.interpreted(),
        **_pipeline(config, aligned),
        BLOCK_T=config["block_t"],
        BLOCKS_PER_ITEM=config["blocks_per_item"],
    )


def vector_shrink(problem: Problem, choice: Choice, kernel: str) -> torch.Tensor:
    """h of all rows in S parts: [S, M, R, h_width] fp32.  kernel: a baseline is launched without persistence."""
    config, slots, x = problem.config("vector_shrink"), problem.slots, problem.x
    split_k, lanes = config["split_k"], -(-problem.max_lora_rank // config["block_r"])
    h = _workspace(problem, split_k, torch.float32)
    items = problem.num_rows * problem.modules * split_k * lanes
    launch.start(
        launch.kernels("vector").vector_shrink,
        launch.num_programs(x.device, config, items) if kernel == "sgmv" else items,
        *(x, problem.segments.rows, problem.segments.described, problem.segments.count),
        *(slots.a_offset, slots.lora_rank, problem.arena, h, problem.arena.numel(), *problem.entry_strides),
        *(
            choice.min_rank,
            choice.max_rank,
            lanes,
            problem.num_rows,
            x.shape[1],
            x.stride(0),
            problem.h_width,
        ),
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
    config, slots = problem.config("vector_expand"), problem.slots
    items = problem.num_rows * sum(-(-width // config["block_c"]) for width in problem.out_widths)
    launch.start(
        launch.kernels("vector").vector_expand,
        launch.num_programs(y.device, config, items) if kernel == "sgmv" else items,
        *(h, problem.segments.rows, problem.segments.described, problem.segments.count, slots.a_offset),
        *(slots.b_offset, slots.lora_rank, slots.scale, problem.arena, y, problem.arena.numel()),
        *(*problem.entry_strides, choice.min_rank, choice.max_rank, problem.max_lora_rank),
        *(problem.num_rows, *problem.out_widths, y.stride(0), problem.h_width),
        MODULES=problem.modules,
        SPLIT_K=h.shape[0],
        ADD=add,
        PADDED=kernel == "bgmv",
        **_threads(config),
        BLOCK_R=config["block_r"],
        BLOCK_C=config["block_c"],
    )


def check_fused(problem: Problem, choice: Choice) -> None:
    """Raises ValueError if an adapter of the class is too large for h to stay on the chip."""
    block_r = problem.config("fused_delta")["block_r"]
    if min(problem.max_lora_rank, choice.max_rank) > block_r:
        raise ValueError(
            f"algorithm='fused' takes ranks up to {block_r}, an adapter at site {problem.site.name!r} may have "
            f"{min(problem.max_lora_rank, choice.max_rank)}; use algorithm='wgmma' or 'vector'"
        )


def fused(problem: Problem, choice: Choice, out: torch.Tensor) -> None:
    """out = delta of the rows whose adapters are of the class."""
    config, slots, x = problem.config("fused_delta"), problem.slots, problem.x
    tiles = problem.segments.tiles(config["block_t"])
    max_items = problem.num_rows * problem.modules * config["column_parts"]
    launch.start(
        launch.kernels("fused").fused_delta,
        launch.num_programs(x.device, config, max_items),
        *(
            x,
            problem.segments.rows,
            tiles.table,
            tiles.count,
            slots.a_offset,
            slots.b_offset,
            slots.lora_rank,
        ),
        *(slots.scale, problem.arena, out, *problem.entry_strides, choice.min_rank, choice.max_rank),
        *(x.shape[1], *problem.out_widths, x.stride(0), out.stride(0)),
        X_DIVISOR=problem.rows_per_input,
        MODULES=problem.modules,
        SPLIT_H=x.dtype != torch.float32,
        UPCAST=launch.interpreted(),
        **_threads(config),
        BLOCK_T=config["block_t"],
        BLOCK_R=config["block_r"],
        BLOCK_K=config["block_k"],
        BLOCK_C=config["block_c"],
        COLUMN_PARTS=config["column_parts"],
    )


def _num_parts(problem: Problem) -> int:
    """Numbers of the model's dtype that together hold an element of h."""
    return 1 if problem.x.dtype == torch.float32 else 2


def _workspace(problem: Problem, parts: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (parts, problem.modules, problem.num_rows, problem.h_width)
    return torch.empty(shape, dtype=dtype, device=problem.x.device)


def _aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _pipeline(config: dict[str, Any], aligned: bool) -> dict[str, Any]:
    """Constants of a tensor-core pipeline.  Only 16-byte rows can go by TMA, and only such loops be specialized."""
    return {
        "ALIGNED": aligned,
        "WARP_SPECIALIZE": aligned and config["warp_specialize"],
        **_threads(config),
    }


def _threads(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "STAGES": config["num_stages"],
        "num_stages": config["num_stages"],
        "num_warps": config["num_warps"],
    }
