# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a GPU.  Legend: T token rows, N heads, D head_dim.

Sequences of one row split keys into parts of `PART_TOKENS`; sequences of several rows go in tiles, in a
separate launch: a decoding sequence keeps its bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_lora.kernels.operands import AttentionOperands, Rotation, StepBounds
from moe_lora.kernels.triton import configs

PART_TOKENS = 256
"""Keys per program of a decoding sequence; fixes the order of sums."""
_JOINED_AT_ONCE = 16
_HEADS_AT_ONCE = 8
_MIN_DOT = 16


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Launch of `attend`."""

    block_m: int
    """Packed query rows."""
    block_n: int
    """Keys of a step."""
    num_warps: int
    num_stages: int
    part_tokens: int = PART_TOKENS


def tiles_for(dtype: torch.dtype, head_dim: int, *, single: bool) -> AttentionTiles:
    """The fastest tried tiles on an H200; fp32 multiplies without tensor cores.

    Triton keeps (num_stages - 1) // 2 key blocks in shared memory.
    """
    if dtype == torch.float32:
        stages = 2 if single else 1  # with 2, tiles of prompts with sinks and a window spill in Triton 3.6
        return AttentionTiles(block_m=_MIN_DOT, block_n=32, num_warps=8, num_stages=stages)
    if head_dim > 128:
        several = 64 if head_dim <= 256 else 32  # 64 rows of 512 spill, and exceed the shared memory
        block_m = _MIN_DOT if single else several
        return AttentionTiles(block_m=block_m, block_n=32, num_warps=4 if single else 8, num_stages=5)
    if single:
        return AttentionTiles(block_m=_MIN_DOT, block_n=128, num_warps=4, num_stages=3)
    return AttentionTiles(block_m=128, block_n=64, num_warps=8, num_stages=3)


def paged_attention(
    operands: AttentionOperands,
    rotation: Rotation | None = None,
    *,
    single: AttentionTiles | None = None,
    several: AttentionTiles | None = None,
) -> torch.Tensor:
    """As `reference.paged_attention`: [T, N, D].

    Rows may be strided.  The step's `bounds` must cover its lengths.  rotation: of q and k, before.  Raises
    ValueError for bad operands.
    """
    _check(operands)
    if rotation is not None:
        _check_rotation(rotation, operands.q)
    out = torch.empty(operands.q.shape, dtype=operands.q.dtype, device=operands.q.device)
    if len(out):
        launch(operands, out, rotation, single, several)
    return out


def launch(
    operands: AttentionOperands,
    out: torch.Tensor,
    rotation: Rotation | None = None,
    single: AttentionTiles | None = None,
    several: AttentionTiles | None = None,
) -> None:
    """`paged_attention` of checked operands, into out."""
    q, step = operands.q, operands.step
    bounds = step.bounds or StepBounds.of(step.query_start, step.seq_lens)
    all_single = not bounds.has_several and len(q) == len(step.seq_lens)
    operands = operands._replace(q=_write_kv(operands, rotation, all_single=all_single))
    if bounds.has_single:
        _attend_single(operands, out, bounds, single or tiles_for(q.dtype, q.shape[2], single=True))
    if bounds.has_several:
        _attend_several(operands, out, several or tiles_for(q.dtype, q.shape[2], single=False))


def _write_kv(operands: AttentionOperands, rotation: Rotation | None, *, all_single: bool) -> torch.Tensor:
    """Write K, rotated, and V to pages; returns rotated q."""
    q, k, v, layout = operands.q, operands.k, operands.v, operands.layout
    heads = q.shape[1]
    blocks = 2 * -(-layout.num_kv_heads // _HEADS_AT_ONCE)
    rotated, clip, eps = q, None, 0.0
    numbers: tuple[torch.Tensor, ...] = (q, q, q, q)
    if rotation is not None:
        blocks += -(-heads // _HEADS_AT_ONCE)
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        clip, eps, norms = rotation.clip, rotation.eps, (rotation.q_weight, rotation.k_weight)
        of_norms = (q if one is None else one.contiguous() for one in norms)
        numbers = (rotation.cos.contiguous(), rotation.sin.contiguous(), *of_norms)
    pages, *places = _pages(operands)
    configs.start(
        configs.kernels("attention.kv_kernels").write_kv,
        k.shape[0] * blocks,
        *(q, k, v, rotated, pages, numbers, *_tables(operands)[:3], float(eps), float(clip or 0.0)),
        *(*_tables(operands)[3:], *places, q.stride(0), k.stride(0), v.stride(0)),
        HEADS=heads if rotation is not None else 0,
        KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        NEIGHBOURS=rotation is not None and rotation.neighbours,
        ROTATED_DIMS=layout.head_dim if rotation is None else 2 * rotation.cos.shape[1],
        BLOCK_SIZE=layout.block_size,
        SINGLE=all_single,
        ROTATES=rotation is not None,
        NORMS=rotation is not None and rotation.q_weight is not None,
        CLIPS=clip is not None,
        INTERPRETED=configs.interpreted(),
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_D=_power_of_two(-(-layout.head_dim // 2)),
        num_warps=2,
    )
    return rotated


def _attend_single(
    operands: AttentionOperands, out: torch.Tensor, bounds: StepBounds, tiles: AttentionTiles
) -> None:
    """Sequences of one row, in parts, and their join."""
    q, sinks, window, layout = operands.q, operands.sinks, operands.window, operands.layout
    num_seqs, heads, head_dim = len(operands.step.seq_lens), q.shape[1], q.shape[2]
    seen = bounds.longest_single
    if window > 0:
        seen = min(seen, window + tiles.block_n - 1)
    most_parts = max(1, -(-seen // tiles.part_tokens))
    num_parts = num_seqs * most_parts
    if bounds.single_tokens is not None:
        num_parts = min(num_parts, num_seqs + bounds.single_tokens // tiles.part_tokens)
    sums = torch.empty((num_parts if most_parts > 1 else 0, heads, head_dim), device=q.device)
    weights = torch.empty((*sums.shape[:2], 2), device=q.device)
    _attend(operands, out, (sums, weights), num_parts * layout.num_kv_heads, tiles, single=True)
    if most_parts == 1:
        return
    configs.start(
        configs.kernels("attention.attention_kernels").join_parts,
        num_seqs * heads,
        *(sums, weights, out, q if sinks is None else sinks),
        *(operands.step.query_start, operands.step.seq_lens, window, num_seqs),
        HEADS=heads,
        HEAD_DIM=head_dim,
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window > 0,
        PART=tiles.part_tokens,
        BLOCK_N=tiles.block_n,
        BLOCK_D=_power_of_two(head_dim),
        BLOCK_P=_JOINED_AT_ONCE,
        num_warps=4,
    )


def _attend_several(operands: AttentionOperands, out: torch.Tensor, tiles: AttentionTiles) -> None:
    """Sequences of several rows, in tiles from query_start // rows + number."""
    rows = _rows_of(operands, tiles)
    num_tiles = operands.q.shape[0] // rows + len(operands.step.seq_lens)
    programs = num_tiles * operands.layout.num_kv_heads
    _attend(operands, out, (out, out), programs, tiles, single=False)


def _attend(
    operands: AttentionOperands,
    out: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor],
    programs: int,
    tiles: AttentionTiles,
    *,
    single: bool,
) -> None:
    q, sinks, window, layout = operands.q, operands.sinks, operands.window, operands.layout
    pages, *places = _pages(operands)
    tables = _tables(operands)
    group = q.shape[1] // layout.num_kv_heads
    configs.start(
        configs.kernels("attention.attention_kernels").attend,
        programs,
        *(q, pages, out, q if sinks is None else sinks, *parts, *tables[:3], operands.scale, window),
        *(*tables[3:], *places, q.stride(0)),
        KV_HEADS=layout.num_kv_heads,
        GROUP=group,
        HEAD_DIM=layout.head_dim,
        BLOCK_SIZE=layout.block_size,
        SINGLE=single,
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window > 0,
        INTERPRETED=configs.interpreted(),
        ROWS=1 if single else _rows_of(operands, tiles),
        PART=tiles.part_tokens,
        BLOCK_M=max(tiles.block_m, _power_of_two(group)),
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(_MIN_DOT, _power_of_two(layout.head_dim)),
        STAGES=tiles.num_stages,
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def _rows_of(operands: AttentionOperands, tiles: AttentionTiles) -> int:
    group = operands.q.shape[1] // operands.layout.num_kv_heads
    return max(tiles.block_m, _power_of_two(group)) // group


def _pages(operands: AttentionOperands) -> tuple[torch.Tensor, int, int, int]:
    """The arena in the layout's dtype; in elements: page size, offsets of K and V."""
    layout, itemsize = operands.layout, operands.layout.dtype.itemsize
    half = layout.layer_bytes // 2 // itemsize
    start = operands.layer * 2 * half
    return operands.arena.view(layout.dtype), layout.page_bytes // itemsize, start, start + half


def _tables(operands: AttentionOperands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    step = operands.step
    return step.query_start, step.seq_lens, step.block_tables, *step.block_tables.shape


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check(operands: AttentionOperands) -> None:
    q, k, v, sinks, scale, _, layer, step, layout, arena = operands
    if q.device.type != "cuda" and not configs.interpreted():
        raise ValueError(f"q lies on {q.device}; these kernels take CUDA tensors")
    if q.dtype not in configs.DTYPE_NAMES or not q.dtype == k.dtype == v.dtype == layout.dtype:
        raise ValueError(
            f"q, k, v and the pages are {q.dtype}, {k.dtype}, {v.dtype}, {layout.dtype}; they must be one of "
            "bfloat16, float16 and float32"
        )
    kv_shape = (q.shape[0], layout.num_kv_heads, layout.head_dim)
    if k.shape != kv_shape or v.shape != kv_shape or q.dim() != 3 or q.shape[2] != layout.head_dim:
        shapes = ", ".join(str(tuple(one.shape)) for one in (q, k, v))
        raise ValueError(f"q, k, v are {shapes}; k and v must be {kv_shape}, q as many rows of that head_dim")
    if q.shape[1] % layout.num_kv_heads:
        raise ValueError(f"{q.shape[1]} heads cannot share {layout.num_kv_heads} kv heads; give a multiple")
    if any(one.stride()[1:] != (layout.head_dim, 1) for one in (q, k, v)):
        raise ValueError("heads of a row of q, k and v must lie one after the other")
    if not 0 <= layer < layout.num_layers or scale <= 0:
        raise ValueError(f"layer={layer} of {layout.num_layers}, scale={scale}; scale must be positive")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"sinks are {tuple(sinks.shape)}; {q.shape[1]} heads have one each, contiguous")
    tables = (step.query_start, step.seq_lens, step.block_tables)
    if any(one.dtype != torch.int32 or not one.is_contiguous() for one in tables):
        raise ValueError("query_start, seq_lens and block_tables must be int32 and contiguous")
    if len({len(step.query_start) - 1, len(step.seq_lens), len(step.block_tables)}) > 1:
        raise ValueError(f"the step's tables have {[len(one) for one in tables]} rows; S + 1, S and S fit")
    devices = {one.device for one in (q, k, v, arena, *tables)}
    if len(devices) > 1:
        raise ValueError(f"q, k, v, the arena and the step's tables lie on {devices}; one device fits")


def _check_rotation(rotation: Rotation, q: torch.Tensor) -> None:
    num_rows, head_dim = q.shape[0], q.shape[2]
    angles, norms = (rotation.cos, rotation.sin), (rotation.q_weight, rotation.k_weight)
    num_angles = min(rotation.cos.shape[-1], head_dim // 2)
    if any(one.shape != (num_rows, num_angles) or one.dtype != torch.float32 for one in angles):
        shapes = [tuple(one.shape) for one in angles]
        raise ValueError(
            f"cos and sin are {shapes}; needed is fp32, {num_rows} rows of up to {head_dim // 2} each"
        )
    given = [one for one in norms if one is not None]
    if head_dim % 2 or len(given) == 1 or any(one.shape != (head_dim,) for one in given):
        shapes = [tuple(one.shape) for one in given]
        raise ValueError(f"weights of norms are {shapes}; both or none of an even head_dim, {head_dim}, fit")
