# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of one sequence, token by token: bits do not depend on the cut of a prompt into steps.

Legend: T tokens of the sequence in a step, C channels of the convolution, W its width, J key heads, N value
heads, K size of a key head, V of a value head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6
"""Of the norms of q and k."""


def delta_rule(
    qkv_TC: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    conv_CW: torch.Tensor,
    num_k_heads: int,
    v_dim: int,
    state: torch.Tensor,
) -> torch.Tensor:
    """S = exp(log_decay) * S, then S = S + k (beta * (v - k S)), and out = q S / sqrt(K), per value head.

    q, k, v: silu of the causal convolution of qkv; q and k have length 1.  state: of the tokens before, fp32
    `DeltaShape.state_floats`: the last W - 1 rows of qkv, then S [N, K, V]; updated in place; zeros at first.
    Returns [T, N, V] fp32.  Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
    """
    num_tokens, num_heads = beta_TN.shape
    conv_WC = conv_CW.float().t().contiguous()
    history_WC = state[: (len(conv_WC) - 1) * qkv_TC.shape[1]].view(len(conv_WC) - 1, -1)
    memory_NKV = state[history_WC.numel() :].view(num_heads, -1, v_dim)
    rows_TC = torch.cat([history_WC, qkv_TC.float()])
    out_TNV = memory_NKV.new_empty(num_tokens, num_heads, v_dim)
    for t in range(num_tokens):  # with the same shapes for each token: a shape decides the order of sums
        mixed_C = F.silu((rows_TC[t : t + len(conv_WC)] * conv_WC).sum(0))
        q_k_C, v_NV = mixed_C[: -num_heads * v_dim], mixed_C[-num_heads * v_dim :].view(num_heads, v_dim)
        q_NK, k_NK = _unit_heads(q_k_C, num_k_heads).repeat_interleave(num_heads // num_k_heads, dim=1)
        memory_NKV *= log_decay_TN[t].exp()[:, None, None]
        change_NV = (v_NV - (memory_NKV * k_NK.unsqueeze(2)).sum(1)) * beta_TN[t].unsqueeze(1)
        memory_NKV += k_NK.unsqueeze(2) * change_NV.unsqueeze(1)
        out_TNV[t] = (memory_NKV * q_NK.unsqueeze(2)).sum(1) * q_NK.shape[1] ** -0.5
    history_WC.copy_(rows_TC[num_tokens:])
    return out_TNV


def _unit_heads(q_k_C: torch.Tensor, num_k_heads: int) -> torch.Tensor:
    """q and k with heads of length 1: [2, J, K]."""
    heads = q_k_C.view(2, num_k_heads, -1)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
