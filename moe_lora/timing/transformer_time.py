# SPDX-License-Identifier: Apache-2.0
"""Step times of a dense transformer, from its shape and the device's rates."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.timing.step_model import StepModel


@dataclass(frozen=True, kw_only=True)
class TransformerTime:
    """step = fixed_s + max(FLOPs / flops_per_s, bytes / bytes_per_s) (roofline) + delta_row_s per delta.

    FLOPs: 2 num_params per token, and 4 num_layers hidden_size per token and attended token.
    Bytes: weights once, attended KV of decode rows, each used adapter once.
    dtype_bytes: of a weight, mean of mixed formats (`core.weight_format`).
    flops_per_s, bytes_per_s: reached, not peak; of all devices of the instance.
    delta_row_s: a decode row's deltas in all layers; prompt_delta: factor for a prompt row.
    """

    num_params: float
    num_layers: int
    hidden_size: int
    kv_token_bytes: int
    flops_per_s: float
    bytes_per_s: float
    dtype_bytes: float = 2
    fixed_s: float = 0.0
    delta_row_s: float = 0.0
    prompt_delta: float = 1.0

    def step_s(
        self,
        num_tokens: int,
        attended: float,
        decode_context: float,
        adapter_bytes: float,
        num_deltas: float = 0.0,
    ) -> float:
        """num_tokens: rows of the step.  attended: pairs of a row and an attended token.
        decode_context: tokens of all decode rows' contexts.  num_deltas: of all rows, through all layers.
        """
        if not num_tokens:
            return 0.0
        compute_s = (self.flops(num_tokens) + self.attention_flops * attended) / self.flops_per_s
        read = self.num_params * self.dtype_bytes + decode_context * self.kv_token_bytes + adapter_bytes
        return self.fixed_s + max(compute_s, read / self.bytes_per_s) + num_deltas * self.delta_row_s

    def step_model(self, lora_ranks: float, adapter_bytes: float) -> StepModel:
        """As a performance model of decode steps, without context terms.

        lora_ranks, adapter_bytes: of one adapter, all of equal rank.
        """
        per_rank_s = adapter_bytes / self.bytes_per_s / lora_ranks
        seconds = {
            "step": self.fixed_s + self.num_params * self.dtype_bytes / self.bytes_per_s,
            "ranks": self.delta_row_s / lora_ranks,
            "adapter_ranks": per_rank_s,
        }
        prefill_s = {"step": seconds["step"], "tokens": 1 / self.prefill_tokens_per_s}
        return StepModel(kernel="sgmv", form="full", expert_share=1.0, decode_s=seconds, prefill_s=prefill_s)

    def flops(self, num_tokens: float) -> float:
        return 2.0 * self.num_params * num_tokens

    @property
    def attention_flops(self) -> float:
        """Per pair of a token and an attended token."""
        return 4.0 * self.num_layers * self.hidden_size

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of prompts' first tokens."""
        return self.flops_per_s / self.flops(1)

    @property
    def attention_s_per_token2(self) -> float:
        """See `policies.caching.caching.CacheCosts`."""
        return self.attention_flops / self.flops_per_s
