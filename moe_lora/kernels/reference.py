# SPDX-License-Identifier: Apache-2.0
"""The meaning of every operation in torch: oracle of tests, and fallback.

Legend: T token rows, H input width, N output width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import quantised
from .operands import AttentionOperands, KvLayout, LoraOperands, Rotation
from .quantised import QuantisedOperand


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias.  x: [T, H], weight: [N, H], bias: [N] -> [T, N] in x's dtype."""
    return F.linear(x, weight, bias)


def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """out[t*K + k] = x_row @ weight[ids[t, k]].T + bias[ids[t, k]]; id -1 gives a zero row.

    x: [T, H] or [T*K, H].  weight: [E, N, H].  bias: [E, N].  ids: [T, K] int32.  Returns [T*K, N].
    """
    flat_ids = ids.reshape(-1)
    out = x.new_zeros(flat_ids.numel(), weight.shape[1])
    source = input_rows(x, ids)
    for expert in range(weight.shape[0]):
        rows = (flat_ids == expert).nonzero(as_tuple=True)[0]
        if rows.numel():
            expert_bias = None if bias is None else bias[expert]
            out[rows] = F.linear(x[source[rows]], weight[expert], expert_bias)
    return out


def sum_experts(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over k, in order, of weights[t, k] * y[t*K + k], in fp32, rounded to y's dtype.

    y: [T*K, N].  weights: [T, K] fp32.
    """
    first, *rest = zip(y.view(*weights.shape, -1).unbind(1), weights.unsqueeze(2).unbind(1), strict=True)
    total = first[0].float() * first[1]
    for outputs, weight in rest:
        total = total + outputs.float() * weight
    return total.to(y.dtype)


def quantised_linear(
    x: torch.Tensor,
    weight: QuantisedOperand,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    num_out: int,
) -> torch.Tensor:
    """`linear` (ids None) or `expert_linear` over dequantised weights.

    A dynamic format's inputs are dequantised too, in fp64.
    """
    if not weight.form.dynamic:
        plain = quantised.dequantise(weight, num_out, x.shape[1], x.dtype)
        return linear(x, plain, bias) if ids is None else expert_linear(x, plain, bias, ids)
    q, scale, zero = quantised.quantise_rows(x, weight.form)
    values, scales = quantised.unpack(weight, num_out, x.shape[1])
    exact = scale.double() * (q.double() - zero)
    plain = (values.unflatten(-1, (scales.shape[-1], -1)).double() * scales[..., None]).flatten(-2)
    wide = None if bias is None else bias.double()
    found = linear(exact, plain, wide) if ids is None else expert_linear(exact, plain, wide, ids)
    return found.to(x.dtype)


def input_rows(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Row of x for each output: [T*K] int64."""
    rows = torch.arange(ids.numel(), device=ids.device)
    return rows if x.shape[0] == ids.numel() else rows // ids.shape[1]


def arena_rows(
    arena: torch.Tensor, offset_bytes: int, lora_rank: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """`lora_rank` contiguous rows of `width` at a byte offset of the arena."""
    num_bytes = lora_rank * width * dtype.itemsize
    return arena[offset_bytes : offset_bytes + num_bytes].view(dtype).view(lora_rank, width)


def lora_delta(operands: LoraOperands, dtype: torch.dtype | None = None) -> torch.Tensor:
    """delta[i, columns of module m] = round(scale * (x_i @ A.T) @ B), with A and B of row i's adapter.

    In fp32, then rounded to dtype (default: x's): y = round(y + delta) has equal bits for a delta from
    elsewhere.  Returns [T or T*K, sum(out_features)]; zero without an adapter.  Source: Punica (arXiv
    2310.18547), SGMV.
    """
    x, ids, site, layer, token_slots, slots, arena = operands
    num_rows = x.shape[0] if ids is None else ids.numel()
    delta = torch.zeros(num_rows, sum(site.out_features), dtype=dtype or x.dtype, device=x.device)
    if ids is None:
        source = torch.arange(num_rows, device=x.device)
        slot, expert = token_slots.long(), torch.zeros_like(source)
    else:
        source = input_rows(x, ids)
        slot, expert = token_slots.long().repeat_interleave(ids.shape[1]), ids.reshape(-1).long()
        slot = torch.where(expert < 0, -1, slot)
    for slot_id, expert_id in torch.unique(torch.stack([slot, expert], 1), dim=0).tolist():
        if slot_id < 0:
            continue
        rows = ((slot == slot_id) & (expert == expert_id)).nonzero(as_tuple=True)[0]
        segment = x[source[rows]].float()
        for module, (column, width) in enumerate(zip(site.columns, site.out_features, strict=True)):
            index = (slot_id, layer, site.entry(module, expert_id))
            lora_rank = int(slots.lora_rank[index])
            if lora_rank == 0:
                continue
            a = arena_rows(arena, int(slots.a_offset[index]), lora_rank, site.in_features, x.dtype).float()
            b = arena_rows(arena, int(slots.b_offset[index]), lora_rank, width, x.dtype).float()
            sums = slots.scale[index] * ((segment @ a.T) @ b)
            delta[rows, column : column + width] = sums.to(delta.dtype)
    return delta


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    centred: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm of the last dim, or layer norm if centred; in fp32, rounded to x's dtype."""
    x32 = x.float()
    if centred:
        x32 = x32 - x32.mean(-1, keepdim=True)
    y32 = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)) * weight.float()
    return (y32 if bias is None else y32 + bias.float()).to(x.dtype)


def rotate(
    x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, neighbours: bool = False
) -> torch.Tensor:
    """Rotary embedding of the first R of head_dim, in halves or in neighbours.  cos, sin: [T, R / 2] fp32."""
    num_dims = 2 * cos_TD.shape[1]
    if neighbours:
        pairs = x_TND[..., :num_dims].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = rotate(pairs, cos_TD, sin_TD).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([turned, x_TND[..., num_dims:]], dim=-1)
    first, second = x_TND[..., :num_dims].float().chunk(2, dim=-1)
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TND.dtype)
    return rotated if num_dims == x_TND.shape[-1] else torch.cat([rotated, x_TND[..., num_dims:]], dim=-1)


def heads_of(qkv: torch.Tensor, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """q [T, heads, head_dim], k and v [T, kv heads, head_dim] of a fused [T, all heads * head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)


def rotated_heads(qkv: torch.Tensor, num_kv_heads: int, rotation: Rotation) -> tuple[torch.Tensor, ...]:
    """`heads_of`, changed by `rotation`."""
    cos, sin, q_weight, k_weight, eps, clip, head_dim, neighbours = rotation
    if clip is not None:
        qkv = qkv.clamp(-clip, clip)
    q, k, v = heads_of(qkv, num_kv_heads, head_dim or 2 * cos.shape[1])
    if q_weight is not None and k_weight is not None:
        q, k = norm(q, q_weight, eps), norm(k, k_weight, eps)
    if not cos.shape[1]:
        return q, k, v
    return rotate(q, cos, sin, neighbours), rotate(k, cos, sin, neighbours), v


def kv_views(arena: torch.Tensor, layout: KvLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer in the arena: [pages, kv heads, block_size, head_dim] each."""
    typed = arena.view(layout.dtype)
    itemsize = layout.dtype.itemsize
    page, values = layout.page_bytes // itemsize, layout.value_bytes // itemsize
    size = (arena.numel() // layout.page_bytes, layout.num_kv_heads, layout.block_size, layout.head_dim)
    stride = (page, layout.block_size * layout.head_dim, layout.head_dim, 1)
    start = layer * layout.layer_bytes // itemsize
    return typed.as_strided(size, stride, start), typed.as_strided(size, stride, start + values)


def paged_attention(operands: AttentionOperands) -> torch.Tensor:
    """Write K and V to pages, then causal attention of each row over its sequence.

    Returns [T, heads, head_dim]; padding is zero.  Softmax in fp32.
    """
    q, k, v, _, _, _, layer, step, layout, arena = operands
    keys, values = kv_views(arena, layout, layer)
    out = torch.zeros_like(q)
    starts, lens = step.query_start.tolist(), step.seq_lens.tolist()
    for seq, seq_len in enumerate(lens):
        begin, end = starts[seq], starts[seq + 1]
        if seq_len == 0 or begin == end:
            continue
        num_blocks = -(-seq_len // layout.block_size)
        pages = step.block_tables[seq, :num_blocks].long()
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        page, offset = pages[position // layout.block_size], position % layout.block_size
        keys[page, :, offset] = k[begin:end].to(layout.dtype)
        values[page, :, offset] = v[begin:end].to(layout.dtype)
        seq_k = keys[pages].transpose(1, 2).flatten(0, 1)[:seq_len]
        seq_v = values[pages].transpose(1, 2).flatten(0, 1)[:seq_len]
        out[begin:end] = _attend(operands, q[begin:end], seq_k, seq_v, position)
    return out


def _attend(
    operands: AttentionOperands, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Attention of rows at `position`.  q: [Q, heads, D], k, v: [C, kv heads, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    logits = torch.einsum("qhd,chd->hqc", q.float(), k) * operands.scale
    column = torch.arange(k.shape[0], device=q.device)
    hidden = column[None, :] > position[:, None]
    if operands.window > 0:
        hidden |= column[None, :] <= position[:, None] - operands.window
    logits.masked_fill_(hidden[None], float("-inf"))
    if operands.sinks is not None:
        sink = operands.sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, sink], dim=-1)
    return torch.einsum("hqc,chd->qhd", torch.softmax(logits, dim=-1)[..., : k.shape[0]], v).to(q.dtype)
