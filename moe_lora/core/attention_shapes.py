# SPDX-License-Identifier: Apache-2.0
"""Sizes and LoRA sites of special attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

LATENT_SITES = ("latent_k", "latent_v")
"""Sites with a copy for each head of Multi-head Latent Attention."""
DELTA_SITES = ("delta_qkvz", "delta_ba", "delta_out")
"""Sites of Gated DeltaNet layers, in place of attention's."""
GLOBAL_SITES = ("global_qkv", "global_qk", "global_o")
"""Sites of layers with heads of their own size."""
SiteRow = tuple[str, tuple[str, ...], int, tuple[int, ...], int]
"""Fields of a `Site`, without entry_base."""


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of the Gated DeltaNet layers.

    k_dim, v_dim: of a head; a key head serves num_v_heads / num_k_heads neighbouring value heads.
    conv_width: tokens of the causal convolution.  is_interleaved: outputs of q, k, v and z alternate by key
    head.  Source: Gated DeltaNet (arXiv 2412.06464).
    """

    layers: tuple[int, ...]
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    is_interleaved: bool

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ConfigError(
                f"linear_num_key_heads={self.num_k_heads} does not divide "
                f"linear_num_value_heads={self.num_v_heads}; each key head serves as many value heads"
            )

    @property
    def value_size(self) -> int:
        """Width of all value heads."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_size(self) -> int:
        """Width of q, k and v: the convolution's channels."""
        return 2 * self.num_k_heads * self.k_dim + self.value_size

    @property
    def state_floats(self) -> int:
        """fp32 numbers of a layer's state: conv_width - 1 rows of q, k and v, then [k_dim, v_dim] a head."""
        return self.conv_size * (self.conv_width - 1) + self.value_size * self.k_dim

    def site_rows(self, hidden: int) -> list[SiteRow]:
        qkv, z, heads = self.conv_size, self.value_size, self.num_v_heads
        out = ("delta_out", ("delta_out",), z, (hidden,), 0)
        if self.is_interleaved:
            return [
                ("delta_qkvz", ("delta_qkvz",), hidden, (qkv + z,), 0),
                ("delta_ba", ("delta_ba",), hidden, (2 * heads,), 0),
                out,
            ]
        return [
            ("delta_qkvz", ("delta_qkv", "delta_z"), hidden, (qkv, z), 0),
            ("delta_ba", ("delta_b", "delta_a"), hidden, (heads, heads), 0),
            out,
        ]


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Sizes of Multi-head Latent Attention: a latent per token makes K and V.

    q_rank: width of queries' latent, 0 = none.  kv_rank: of K and V.  nope_dim, rope_dim: of a head of q and
    k, without and with rotation.  v_dim: of a head of v.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def cached_dim(self) -> int:
        """Width of a cached token: latent and rotated k."""
        return self.kv_rank + self.rope_dim

    def site_rows(self, hidden: int, heads: int) -> list[SiteRow]:
        """Sites before `o`; kv_b_proj is two sites with a copy per head.

        latent_k maps a head's query to the latent, latent_v latents to the head's output.
        """
        q_size = heads * (self.nope_dim + self.rope_dim)
        q: list[SiteRow] = [("q", ("q",), hidden, (q_size,), 0)]
        if self.q_rank:
            q = [("q_a", ("q_a",), hidden, (self.q_rank,), 0), ("q_b", ("q_b",), self.q_rank, (q_size,), 0)]
        return [
            *q,
            ("kv_a", ("kv_a",), hidden, (self.cached_dim,), 0),
            ("latent_k", ("latent_k",), self.nope_dim, (self.kv_rank,), heads),
            ("latent_v", ("latent_v",), self.kv_rank, (self.v_dim,), heads),
        ]


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Sizes of full attention layers beside windowed layers.

    k_is_v: V is the output of k_proj too, before k's norm and rotation.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    k_is_v: bool

    @property
    def qkv_site(self) -> str:
        """Name of the site of q, k and v."""
        return "global_qk" if self.k_is_v else "global_qkv"

    def site_rows(self, hidden: int, heads: int) -> list[SiteRow]:
        q_size, kv_size = heads * self.head_dim, self.num_kv_heads * self.head_dim
        modules = ("global_q", "global_k", "global_v")[: 2 if self.k_is_v else 3]
        widths = (q_size, kv_size, kv_size)[: len(modules)]
        return [
            (self.qkv_site, modules, hidden, widths, 0),
            ("global_o", ("global_o",), q_size, (hidden,), 0),
        ]
