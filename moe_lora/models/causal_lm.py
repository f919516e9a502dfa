"""A stack of decoder layers between an embedding and a vocabulary head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from moe_lora.kernels import ops

from .layers import DecoderLayer, Norm
from .linear import parameter
from .spec import ModelSpec

LayerForward = Callable[..., torch.Tensor]


class CausalLM(nn.Module):
    """Token ids in, logits of chosen rows out; attention state lies behind the channels.

    experts: those of each layer whose weights are held here, None = all.
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, spec: ModelSpec, experts: range | None = None) -> None:
        super().__init__()
        shape = spec.shape
        self.spec = spec
        self.experts = range(shape.num_experts) if experts is None else experts
        self.embedding = parameter(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, self.experts) for i in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, spec)
        self.head = (
            self.embedding if spec.tie_word_embeddings else parameter(shape.vocab_size, shape.hidden_size)
        )

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each row's rotation: [T, head_dim / 2] fp32."""
        angle = positions.float()[:, None] * self.inverse_frequencies
        factor = self.spec.rope.attention_factor
        return angle.cos() * factor, angle.sin() * factor

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        live: torch.Tensor,
        logit_rows: torch.Tensor,
        channels: Sequence[torch.Tensor],
        layer_forward: LayerForward = DecoderLayer.__call__,
    ) -> torch.Tensor:
        """Logits [len(logit_rows), vocab] fp32.

        tokens, positions: [T] int64.  live: [T] bool, False for padding.  logit_rows: rows that need logits.
        layer_forward: how a layer is run (compiled or not).
        """
        cos, sin = self.rope(positions)
        x = F.embedding(tokens, self.embedding)
        for layer, channel in zip(self.layers, channels, strict=True):
            x = layer_forward(layer, x, channel, cos, sin, live)
        return ops.linear(self.norm(x[logit_rows]), self.head, None).float()
