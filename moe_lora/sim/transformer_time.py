"""How long a step of a dense transformer takes, from its shape and the device's rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransformerTime:
    """step = fixed_s + max(FLOPs / flops_per_s, bytes / bytes_per_s) (roofline).

    FLOPs: 2 num_params per token, and 4 num_layers hidden_size per token and token that it attends to.
    Bytes: weights once, the KV that decode rows attend to, the adapters in use once each.
    flops_per_s, bytes_per_s: what is reached, not the peak; of all devices of the instance together.
    """

    num_params: float
    num_layers: int
    hidden_size: int
    kv_token_bytes: int
    flops_per_s: float
    bytes_per_s: float
    dtype_bytes: int = 2
    fixed_s: float = 0.0

    def step_s(self, num_tokens: int, attended: float, decode_context: float, adapter_bytes: float) -> float:
        """num_tokens: rows of the step.  attended: pairs of a row and a token that it attends to.
        decode_context: tokens of all decode rows' contexts.
        """
        if not num_tokens:
            return 0.0
        compute_s = (self.flops(num_tokens) + self.attention_flops * attended) / self.flops_per_s
        read = self.num_params * self.dtype_bytes + decode_context * self.kv_token_bytes + adapter_bytes
        return self.fixed_s + max(compute_s, read / self.bytes_per_s)

    def flops(self, num_tokens: float) -> float:
        return 2.0 * self.num_params * num_tokens

    @property
    def attention_flops(self) -> float:
        """Per pair of a token and one that it attends to."""
        return 4.0 * self.num_layers * self.hidden_size

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of prompts' first tokens."""
        return self.flops_per_s / self.flops(1)

    @property
    def attention_s_per_token2(self) -> float:
        """See `policies.caching.CacheCosts`."""
        return self.attention_flops / self.flops_per_s
