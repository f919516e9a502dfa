# SPDX-License-Identifier: Apache-2.0
"""Experts on a GPU: grouped GEMMs, the gated activation, the sum over experts.

Legend: T tokens, K experts per token, R rows (T * K), E experts, N output width, H input width.  Sums are in
fp32, in an order by H and dtype alone, without atomics: a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_lora.kernels.operands import Zeros
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.lora.problem import Deltas
from moe_lora.kernels.triton.lora.segments import RowsToSort

ROW_MAX_TOKENS = 8
"""Up to this number of tokens, with at most E rows, each row is a tile."""
ONE_LAUNCH_MAX_ROWS = 1024
"""Up to this number of rows, choosing and ordering are one launch."""
_COLUMN_BLOCK, _BLOCK_K, _BLOCK_SORTED, _BLOCK_OTHER = 1024, 64, 8, 256
_ROW_COLUMNS, _DEEP_PER_SM, _LONG_WIDTH = 64, 2, 2560
_SORT_BLOCK, _MANY_ROWS, _SORT_BLOCK_OF_MANY = 1024, 8192, 8192


class Gate(NamedTuple):
    """Activation from gate_up's halves; see `models.linear.glu`."""

    clamped: bool
    limit: float


class TileConfig(NamedTuple):
    """Tiles of a launch."""

    block_t: int
    """Rows."""
    block_n: int
    """Columns of N."""
    block_k: int
    group: int
    """Tiles in parallel along N."""
    num_stages: int
    num_warps: int
    programs_per_sm: int


def tile_config(dtype: torch.dtype, width: int, block_t: int, gated: bool) -> TileConfig:
    """Tiles of at most block_t rows; block_k, by dtype and width, fixes the order of sums."""
    if dtype == torch.float32:
        return TileConfig(min(block_t, 32), 32, 32, 8, 2, 4, 2)
    if width % _BLOCK_K:
        return TileConfig(min(block_t, 32), 64, 32, 8, 2, 4, 2)
    if block_t == 16 and gated:
        return TileConfig(16, 64, _BLOCK_K, 8, 5, 4, 2)
    if block_t < 128:
        per_sm = 3 if block_t == 16 else 2
        return TileConfig(block_t, 64 if gated else 128, _BLOCK_K, 8, 4, 4, per_sm)
    return TileConfig(128, 128 if gated else 256, _BLOCK_K, 8, 4, 8, 1)


def row_config(dtype: torch.dtype, width: int, gated: bool, all_at_once: bool) -> TileConfig:
    """For tiles of one row: narrow blocks, to fill the device.

    all_at_once: two programs per SM hold all items.
    """
    config = tile_config(dtype, width, 16, gated)
    if config.block_k == _BLOCK_K:
        config = config._replace(block_n=_ROW_COLUMNS, num_stages=4, programs_per_sm=3)
        if all_at_once or width >= _LONG_WIDTH:
            config = config._replace(num_stages=6, num_warps=8, programs_per_sm=_DEEP_PER_SM)
    return config._replace(group=64)


_MOST_OF_TILES = ((16, 12), (32, 24), (64, 80))
"""Sizes of tiles, each with the largest mean number of an expert's rows (H200)."""


def rows_of_tiles(num_rows: int, num_experts: int) -> int:
    """block_t for sorted rows."""
    return next((block_t for block_t, mean in _MOST_OF_TILES if num_rows <= mean * num_experts), 128)


class GateChoice(NamedTuple):
    """How a gate chooses `top_k` experts."""

    top_k: int
    scores: int
    """0: softmax of the chosen logits, 1: softmax of all, 2: sigmoids."""
    norm: float = 0.0
    """p of the p-norm that divides the chosen scores of 1 and 2; 0: not divided."""
    num_groups: int = 1
    """Equal groups of experts."""
    top_groups: int = 1
    """Number of groups with chosen experts, by largest sums of two scores."""
    scale: float = 1.0
    """Of the weights."""


def choose(
    logits: torch.Tensor, live: torch.Tensor, choice: GateChoice, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert weights [T, K] fp32 and ids [T, K] int32, ascending in each row; ties: the first.

    logits: [T, E].  live: [T] bool; other ids are -1.  correction: [E] fp32, in the choice only.  Raises
    ValueError for bad operands.
    """
    weights, ids, operands, constants = _chosen(logits, live, choice, correction)
    if len(logits):
        kernel = configs.kernels("linear.expert_kernels").choose_experts
        numbers = (logits.shape[1], float(choice.norm), float(choice.scale))
        configs.start(kernel, len(logits), *operands, *numbers, **constants, num_warps=1)
    return weights, ids


def choose_and_order(
    logits: torch.Tensor,
    live: torch.Tensor,
    choice: GateChoice,
    correction: torch.Tensor | None,
    held: range,
    zeros: Zeros,
    rows_to_sort: Callable[[torch.Tensor], RowsToSort | None] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`choose`, and `order` of the rows of experts `held`; one launch if few.

    rows_to_sort: LoRA rows to sort in the same launch.
    """
    num_tokens, num_experts = logits.shape
    if not 0 < num_tokens * choice.top_k <= ONE_LAUNCH_MAX_ROWS:
        weights, ids = choose(logits, live, choice, correction)
        return weights, ids, order(ids, len(held), held.start)
    weights, ids, operands, constants = _chosen(logits, live, choice, correction)
    found = _empty_order(ids, len(held))
    rows = None if rows_to_sort is None else rows_to_sort(ids)
    ordered = 0 if not held or by_rows(ids, len(held)) else len(held) + 1
    if not ordered and rows is None:
        return *choose(logits, live, choice, correction), found
    *to_sort, sizes = ((ids,) * 7 + ((0, 0, 0),)) if rows is None else rows.operands
    blocks = 0 if rows is None else -(-ids.numel() // _BLOCK_SORTED)
    configs.start(
        configs.kernels("linear.expert_kernels").choose_and_order,
        num_tokens + ordered + blocks,
        *(*operands, found, tuple(to_sort), zeros.take(2, ids.device)),
        *(num_tokens, num_experts, float(choice.norm), float(choice.scale)),
        *(held.start, len(held), ordered, *sizes),
        SORTS=rows is not None,
        CUT=rows is not None and rows.cuts,
        INTERPRETED=configs.interpreted(),
        BLOCK=256,
        BLOCK_SORTED=_BLOCK_SORTED,
        BLOCK_OTHER=_BLOCK_OTHER,
        **constants,
        num_warps=1,
    )
    return weights, ids, found


def _chosen(
    logits: torch.Tensor, live: torch.Tensor, choice: GateChoice, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], dict[str, Any]]:
    num_tokens, num_experts = logits.shape
    top_k, is_softmax_last = choice.top_k, choice.scores == 0
    if live.shape != (num_tokens,) or live.dtype != torch.bool or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"logits are {tuple(logits.shape)}, live {tuple(live.shape)} {live.dtype}, top_k={top_k}; needed "
            "are a bool for each row, and 1 to as many experts as there are"
        )
    in_group, rest = divmod(num_experts, choice.num_groups)
    if choice.num_groups > 1 and (
        rest or in_group < 2 or not top_k <= choice.top_groups * in_group <= num_experts
    ):
        raise ValueError(f"{choice} does not fit {num_experts} experts: groups must be equal, of 2 or more")
    if correction is not None and (correction.shape != (num_experts,) or correction.dtype != torch.float32):
        raise ValueError(f"correction is {tuple(correction.shape)} {correction.dtype}; fp32 of E fits")
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    by_sum = choice.norm == 1 or is_softmax_last
    constants = {
        "TOP_K": top_k,
        "SCORES": choice.scores,
        "NORM": 1 if by_sum else 2 if choice.norm else 0,
        "CORRECTED": correction is not None,
        "GROUPS": choice.num_groups,
        "TOP_GROUPS": choice.top_groups,
        "EXPERTS": 1 << (num_experts - 1).bit_length(),
    }
    given = logits if correction is None else correction.contiguous()
    return weights, ids, (logits.contiguous(), live.contiguous(), weights, ids, given), constants


def by_rows(ids: torch.Tensor, num_experts: int) -> bool:
    """True if every row is a tile, without an order."""
    return ids.shape[0] <= ROW_MAX_TOKENS and ids.numel() <= num_experts


def order(ids: torch.Tensor, num_experts: int, first: int = 0) -> torch.Tensor:
    """[E + 2 + R] int32: see `expert_kernels.order_rows`; not filled for `by_rows`.

    ids: [T, K] int32; numbers outside of the E from `first` on count as none.
    """
    if ids.dtype != torch.int32 or ids.dim() != 2:
        raise ValueError(f"ids is {tuple(ids.shape)} {ids.dtype}; it must be [T, K] int32")
    found = _empty_order(ids, num_experts)
    if num_experts and not by_rows(ids, num_experts):
        kernel = configs.kernels("linear.expert_kernels").order_rows
        operands = (ids.contiguous(), found, ids.numel(), first, num_experts)
        block = _SORT_BLOCK if ids.numel() <= _MANY_ROWS else _SORT_BLOCK_OF_MANY
        configs.start(kernel, num_experts + 1, *operands, BLOCK=block, num_warps=8)
    return found


def _empty_order(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.empty(num_experts + 2 + ids.numel(), dtype=torch.int32, device=ids.device)


def adds_deltas(ids: torch.Tensor, num_experts: int) -> bool:
    """True if `linear` accepts deltas: tiles of 128 rows leave no registers."""
    return by_rows(ids, num_experts) or rows_of_tiles(ids.numel(), num_experts) < 128


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    order: torch.Tensor,
    gate: Gate | None = None,
    deltas: Deltas | None = None,
) -> torch.Tensor:
    """`reference.expert_linear`, [R, N]; with a gate its activation, [R, N / 2].

    x: [T, H] or [R, H], bf16, fp16 or fp32.  order: of the same ids.  deltas: added before the gate, if
    `adds_deltas` and x [T, H].  Raises ValueError for bad operands.
    """
    num_experts, out_width, width = weight.shape
    _check(x, weight, bias, ids, order)
    num_rows = ids.numel()
    if deltas is not None:
        _check_deltas(deltas, x, ids, num_experts, out_width, gate)
    y = x.new_empty(num_rows, out_width if gate is None else out_width // 2)
    if num_rows == 0:
        return y
    alone = by_rows(ids, num_experts)
    if alone:
        items = num_rows * -(-y.shape[1] // _ROW_COLUMNS)
        all_at_once = items <= configs.programs_at_once(x.device, _DEEP_PER_SM)
        config = row_config(x.dtype, width, gate is not None, all_at_once)
    else:
        block_t = rows_of_tiles(num_rows, num_experts)
        config = tile_config(x.dtype, width, block_t, gate is not None)
    most_tiles = num_rows if alone else min(num_rows, num_rows // config.block_t + num_experts + 1)
    items = most_tiles * -(-y.shape[1] // config.block_n)
    configs.start(
        configs.kernels("linear.expert_kernels").expert_linear,
        configs.num_programs(x.device, config._asdict(), items),
        *(x.contiguous(), weight, weight if bias is None else bias, ids.contiguous(), order, y),
        *((y, ids, ids, 0, 0) if deltas is None else deltas),
        *(num_rows, num_experts, out_width, width, 0.0 if gate is None else gate.limit),
        ROWS_PER_INPUT=num_rows // x.shape[0],
        SORTED=not alone,
        GATED=gate is not None,
        CLAMPED=gate is not None and gate.clamped,
        HAS_BIAS=bias is not None,
        HAS_DELTAS=deltas is not None,
        EVEN=width % config.block_k == 0,
        INTERPRETED=configs.interpreted(),
        EXPERTS=1 << num_experts.bit_length(),
        **launch_constants(config),
    )
    return y


def launch_constants(config: TileConfig) -> dict[str, Any]:
    """The configuration as constants and compile options."""
    return {
        "BLOCK_T": config.block_t,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "STAGES": config.num_stages,
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
    }


def gate(y: torch.Tensor, how: Gate) -> torch.Tensor:
    """The activation of each row's halves: [R, 2F] -> [R, F]."""
    out = y.new_empty(y.shape[0], y.shape[1] // 2)
    if out.numel():
        programs = out.shape[0] * -(-out.shape[1] // _COLUMN_BLOCK)
        configs.start(
            configs.kernels("linear.expert_kernels").gate_rows,
            programs,
            *(y.contiguous(), out, out.shape[1], how.limit),
            CLAMPED=how.clamped,
            INTERPRETED=configs.interpreted(),
            BLOCK=_COLUMN_BLOCK,
        )
    return out


def weighted_sum(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`reference.sum_experts`.  y: [R, N].  weights: [T, K] fp32."""
    num_tokens, top_k = weights.shape
    out = y.new_empty(num_tokens, y.shape[1])
    if out.numel():
        configs.start(
            configs.kernels("linear.expert_kernels").sum_experts,
            num_tokens * -(-y.shape[1] // _COLUMN_BLOCK),
            *(y.contiguous(), weights.contiguous(), out, y.shape[1]),
            TOP_K=top_k,
            INTERPRETED=configs.interpreted(),
            BLOCK=_COLUMN_BLOCK,
        )
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    order: torch.Tensor,
) -> None:
    num_experts, out_width, width = weight.shape
    if x.dtype not in configs.DTYPE_NAMES or weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; both are bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] != width or x.shape[0] not in (ids.shape[0], ids.numel()):
        raise ValueError(
            f"x is {tuple(x.shape)}; rows of {width} are needed, one for each of {ids.shape[0]} tokens or "
            f"{ids.numel()} rows"
        )
    if bias is not None and bias.shape != (num_experts, out_width):
        raise ValueError(f"bias is {tuple(bias.shape)}; it must be {(num_experts, out_width)}")
    if order.shape != (num_experts + 2 + ids.numel(),):
        raise ValueError(f"order has {order.numel()} elements; it must be made of the same ids and experts")
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}; it must be contiguous")


def _check_deltas(
    deltas: Deltas, x: torch.Tensor, ids: torch.Tensor, num_experts: int, out_width: int, gate: Gate | None
) -> None:
    values = deltas.values
    if values.shape != (ids.numel(), out_width) or values.dtype != x.dtype or not values.is_contiguous():
        raise ValueError(
            f"deltas are {tuple(values.shape)} {values.dtype}; {(ids.numel(), out_width)} {x.dtype} is needed"
        )
    if gate is None or len(x) != len(ids) or deltas.token_slots.shape != ids.shape[:1]:
        raise ValueError(
            "deltas are added before a gate, with a row of x and a slot per token; "
            f"gate={gate}, x has {len(x)} rows, {len(deltas.token_slots)} slots, ids {len(ids)} tokens"
        )
    if not adds_deltas(ids, num_experts):
        raise ValueError(
            f"deltas were given for {ids.numel()} rows of {num_experts} experts, whose tiles of 128 rows "
            "take none; ask `adds_deltas` first, add them to the output without a gate and use `gate`"
        )
