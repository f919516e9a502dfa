# SPDX-License-Identifier: Apache-2.0
"""A decoder model's sizes and LoRA sites.

A LoRA module m of a site adds to the site's fused output y:

    y[:, columns[m] : columns[m] + out_features[m]] += scale * (x @ A.T) @ B.T

with A [lora_rank, in_features] and B [out_features[m], lora_rank].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from .attention_shapes import (
    DELTA_SITES,
    GLOBAL_SITES,
    LATENT_SITES,
    DeltaShape,
    GlobalHeads,
    MlaShape,
    SiteRow,
)
from .errors import ConfigError

MATRIX_ALIGN_BYTES = 64
"""Alignment of each A and B matrix."""
MAX_CUDA_LORA_RANK = 512
"""Limit of the CUDA kernels' launch tables."""
DEFAULT_LORA_RANK = 16
"""Assumed for unknown adapters."""
HEAD_MODULE, EMBEDDING_MODULE = "lm_head", "embed_tokens"
ATTENTION_SITES = ("qkv", "o", "output_gate", "q", "q_a", "q_b", "kv_a", *LATENT_SITES)
DENSE_SITES = ("dense_gate_up", "dense_down")
"""Sites of dense layers among layers with experts."""
NEVER_QUANTISED = ("router", "shared_gate", "delta_ba", *LATENT_SITES)
"""Sites with weights in the model's dtype."""
DEFAULT_TARGETS = ("qkv", "o", "gate_up", "down")
RANK_LIMITS: Mapping[str, int | None] = {"cpu": None, "cuda": MAX_CUDA_LORA_RANK}
"""Largest LoRA rank by type of device; None: any."""


def rank_limit(max_lora_rank: int | None, devices: Iterable[str]) -> int | None:
    """The largest LoRA rank of these devices (such as cuda:1); None: any."""
    limits = {max_lora_rank, *(RANK_LIMITS.get(one.partition(":")[0]) for one in devices)}
    return min((one for one in limits if one is not None), default=None)


def rank_problem(lora_rank: int, limit: int) -> str:
    """Error text for an adapter above the limit."""
    return (
        f"the LoRA rank {lora_rank} is above max_lora_rank={limit} of this server; start the server with "
        f"--max-lora-rank {lora_rank} or more (at most {MAX_CUDA_LORA_RANK} on CUDA), or train the adapter "
        "with a lower rank"
    )


@dataclass(frozen=True)
class Site:
    """A place in a layer where one input feeds LoRA modules.

    `num_experts` is 0 at a dense site, else the number of copies: experts or heads.  The site's rows of the
    offset table start at `entry_base`, expert-major.
    """

    name: str
    modules: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    num_experts: int
    entry_base: int

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """First output column of each module."""
        return tuple(accumulate(self.out_features, initial=0))[:-1]

    @property
    def total_out_features(self) -> int:
        """Width of the site's fused output y."""
        return sum(self.out_features)

    @property
    def is_routed(self) -> bool:
        """True if the copies are experts behind a gate."""
        return self.num_experts > 0 and self.name not in LATENT_SITES

    @cached_property
    def num_entries(self) -> int:
        """Rows of this site in the offset table."""
        return len(self.modules) * max(1, self.num_experts)

    def entry(self, module: int, expert: int = 0) -> int:
        """Row of (module index, expert) in the offset table."""
        return self.entry_base + expert * len(self.modules) + module


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one base model; `num_experts` is 0 for a dense model.

    `intermediate_size`: of one expert (or of the dense MLP).  has_output_gate: a gate scales the heads'
    outputs.  shared_size: width of the shared expert, 0 = none; has_shared_gate scales its output.
    dense_layers: layers with a dense MLP of width dense_size in place of experts.  gated_q: the outputs of q
    are query and gate of each head.  mla: over one KV head of head_dim mla.cached_dim.  Raises ConfigError
    for impossible sizes.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype_bytes: int
    fused_qkv: bool = False
    fused_gate_up: bool = False
    num_windowed_layers: int = 0
    has_output_gate: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    dense_size: int = 0
    dense_layers: tuple[int, ...] = ()
    gated_q: bool = False
    delta: DeltaShape | None = None
    mla: MlaShape | None = None
    global_heads: GlobalHeads | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be an integer of 1 or more")
        of_global = () if self.global_heads is None else (self.global_heads.num_kv_heads,)
        for num_kv_heads in (self.num_kv_heads, *of_global):
            if self.num_heads % num_kv_heads:
                raise ConfigError(
                    f"num_kv_heads={num_kv_heads} does not divide num_heads={self.num_heads}; "
                    "grouped-query attention needs whole groups"
                )
        if not min(1, self.num_experts) <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token={self.num_experts_per_token} must lie between "
                f"{min(1, self.num_experts)} and num_experts={self.num_experts}"
            )
        if self.num_experts and len(self.dense_layers) == self.num_layers:
            raise ConfigError(
                f"all of num_layers={self.num_layers} layers are dense; the model needs a layer with experts"
            )

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """LoRA sites in the offset table's order; see `has_site`."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_experts
        q_out = q_size * (1 + self.gated_q)
        qkv: tuple[tuple[str, ...], tuple[int, ...]] = (("q", "k", "v"), (q_out, kv_size, kv_size))
        if self.fused_qkv:
            qkv = (("qkv",), (q_size + 2 * kv_size,))
        gate_up = (("gate_up",), (2 * inner,)) if self.fused_gate_up else (("gate", "up"), (inner, inner))
        rows: list[SiteRow] = [("qkv", qkv[0], hidden, qkv[1], 0)]
        if self.mla is not None:
            rows, q_size = self.mla.site_rows(hidden, self.num_heads), self.num_heads * self.mla.v_dim
        rows.append(("o", ("o",), q_size, (hidden,), 0))
        if experts:
            rows.append(("router", ("router",), hidden, (experts,), 0))
        rows.append(("gate_up", gate_up[0], hidden, gate_up[1], experts))
        rows.append(("down", ("down",), inner, (hidden,), experts))
        if self.has_output_gate:
            rows.append(("output_gate", ("output_gate",), hidden, (q_size,), 0))
        if shared := self.shared_size:
            rows.append(("shared_gate_up", ("shared_gate", "shared_up"), hidden, (shared, shared), 0))
            rows.append(("shared_down", ("shared_down",), shared, (hidden,), 0))
            if self.has_shared_gate:
                rows.append(("shared_gate", ("shared_expert_gate",), hidden, (1,), 0))
        if self.dense_layers:
            dense = self.dense_size
            rows.append(("dense_gate_up", ("dense_gate", "dense_up"), hidden, (dense, dense), 0))
            rows.append(("dense_down", ("dense_down",), dense, (hidden,), 0))
        if self.delta is not None:
            rows += self.delta.site_rows(hidden)
        if self.global_heads is not None:
            rows += self.global_heads.site_rows(hidden, self.num_heads)
        sites: list[Site] = []
        for row in rows:
            sites.append(Site(*row, sites[-1].entry_base + sites[-1].num_entries if sites else 0))
        return tuple(sites)

    def has_site(self, layer: int, name: str) -> bool:
        if name not in self._site_names:
            return False
        held = DELTA_SITES if self.is_recurrent(layer) else ATTENTION_SITES
        if self.global_heads is not None and layer in self.global_heads.layers:
            held = GLOBAL_SITES
        if name in (*ATTENTION_SITES, *DELTA_SITES, *GLOBAL_SITES):
            return name in held
        return (layer in self.dense_layers) == (name in DENSE_SITES)

    def is_recurrent(self, layer: int) -> bool:
        """True for a Gated DeltaNet layer, with a state in place of KV."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    def state_pages(self, page_bytes: int) -> int:
        """Pages of a sequence's state, whole pages for each layer."""
        if self.delta is None:
            return 0
        return len(self.delta.layers) * -(-4 * self.delta.state_floats // page_bytes)

    def check_equal_layers(self, what: str) -> None:
        """Raises ConfigError unless all layers have attention, and one MLP or routed experts."""
        unequal = self.delta or self.mla or self.global_heads
        if self.dense_layers or self.shared_size or self.has_output_gate or unequal:
            raise ConfigError(
                f"{what} counts equal layers of attention and one MLP or routed experts; {self.family} has "
                f"{self.num_layers - self.num_kv_layers} recurrent layers, {len(self.dense_layers)} dense "
                f"layers, shared_size={self.shared_size} and has_output_gate={self.has_output_gate}"
                f"{' and latent attention' if self.mla else ''}; time whole steps with moe-lora "
                "profile-steps instead"
            )

    @cached_property
    def layers_with(self) -> dict[str, int]:
        """Number of layers with each site."""
        return {one: sum(self.has_site(i, one) for i in range(self.num_layers)) for one in self._site_names}

    @cached_property
    def _site_names(self) -> frozenset[str]:
        return frozenset(site.name for site in self.sites)

    @cached_property
    def num_entries(self) -> int:
        """Rows of one layer's offset table."""
        return sum(site.num_entries for site in self.sites)

    @cached_property
    def outer_sites(self) -> tuple[Site, ...]:
        """Sites outside the layers: the vocabulary head, then the embedding of one-hot tokens.

        Their pairs form one more layer.
        """
        vocab, hidden, first = self.vocab_size, self.hidden_size, self.num_entries
        return (
            Site("head", (HEAD_MODULE,), hidden, (vocab,), 0, first),
            Site("embedding", (EMBEDDING_MODULE,), vocab, (hidden,), 0, first + 1),
        )

    @cached_property
    def column_sites(self) -> tuple[Site, ...]:
        """Sites with output columns to scale and shift: the dense sites without the router.

        B has two rows, factor - 1 and shift; A is empty but for its alignment.
        """
        entry_base, found = self.outer_sites[-1].entry_base + 1, list[Site]()
        for site in self.sites:
            if not site.num_experts and site.name != "router":
                found.append(replace(site, in_features=1, entry_base=entry_base))
                entry_base += site.num_entries
        return tuple(found)

    @property
    def special_layers(self) -> list[str]:
        """Kinds of layers that some devices and parts do not compute."""
        kinds = {
            "Gated DeltaNet layers": self.delta,
            "Multi-head Latent Attention": self.mla,
            "layers with heads of two sizes": self.global_heads,
        }
        return [kind for kind, sizes in kinds.items() if sizes is not None]

    @cached_property
    def sites_by_name(self) -> dict[str, Site]:
        """Sites of the layers, and outer sites."""
        return {site.name: site for site in (*self.sites, *self.outer_sites)}

    def site(self, name: str) -> Site:
        """The site of this name.  Raises ConfigError."""
        for site in self.sites:
            if site.name == name:
                return site
        raise ConfigError(
            f"{self.family} has no LoRA site {name!r}; choose one of {', '.join(s.name for s in self.sites)}"
        )

    @property
    def default_targets(self) -> tuple[str, ...]:
        """Sites of most adapters: attention, MLP or experts."""
        if self.global_heads is not None:
            return (*DEFAULT_TARGETS, self.global_heads.qkv_site, "global_o")
        if self.mla is None:
            return DEFAULT_TARGETS
        rows = self.mla.site_rows(self.hidden_size, self.num_heads)
        return (*(row[0] for row in rows), *DEFAULT_TARGETS[1:])

    def adapter_bytes(
        self,
        lora_rank: int,
        targets: Iterable[str] | None = None,
        shared_gate_up_a: bool = False,
        expert_parallel: int = 1,
    ) -> int:
        """Bytes of one packed adapter on one rank, with alignment.

        targets: site names; None: `default_targets`.  shared_gate_up_a: gate and up of an expert share one A
        (the fused PEFT form).
        """
        if lora_rank < 1:
            raise ConfigError(f"lora_rank={lora_rank} must be 1 or more")
        num_bytes = 0
        for site in {self.site(name) for name in (self.default_targets if targets is None else targets)}:
            shared = shared_gate_up_a and site.name == "gate_up"
            num_a = 1 if shared else len(site.modules)
            features = [site.in_features] * num_a + list(site.out_features)
            num_copies = max(1, site.num_experts // expert_parallel)
            of_layer = num_copies * sum(_aligned(lora_rank * size * self.dtype_bytes) for size in features)
            if self.mla is not None and site.name in LATENT_SITES:  # heads share the latent's matrix
                of_layer = _aligned(lora_rank * self.mla.kv_rank * self.dtype_bytes)
                of_head = sum(features) - self.mla.kv_rank
                of_layer += site.num_experts * _aligned(lora_rank * of_head * self.dtype_bytes)
            num_bytes += of_layer * self.layers_with[site.name]
        return num_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of a token's chosen experts over all layers, as int16."""
        return 2 * (self.num_layers - len(self.dense_layers)) * self.num_experts_per_token

    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's K and V, or latents, over all layers."""
        num_parts, layers = 2 if self.mla is None else 1, self.num_kv_layers
        width = layers * self.num_kv_heads * self.head_dim
        if (other := self.global_heads) is not None:
            num = len(other.layers)
            width += num * (other.num_kv_heads * other.head_dim - self.num_kv_heads * self.head_dim)
        return num_parts * width * self.dtype_bytes


_POSITIVE = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "max_position", "dtype_bytes"),
)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // MATRIX_ALIGN_BYTES) * MATRIX_ALIGN_BYTES


def check_expert_parallel(num_experts: int, expert_parallel: int) -> None:
    """Raises ConfigError if ranks don't divide the experts evenly."""
    if expert_parallel == 1 or (num_experts and num_experts % expert_parallel == 0):
        return
    if not num_experts:
        raise ConfigError(
            f"expert_parallel={expert_parallel} needs a Mixture-of-Experts model, and this one is dense; "
            "choose 1"
        )
    *most, last = (str(p) for p in range(1, num_experts + 1) if num_experts % p == 0)
    raise ConfigError(
        f"expert_parallel={expert_parallel} does not divide num_experts={num_experts}; "
        f"choose {', '.join(most)} or {last}"
    )


def experts_of_rank(num_experts: int, expert_parallel: int, dist_rank: int) -> range:
    """The contiguous experts of one rank."""
    check_expert_parallel(num_experts, expert_parallel)
    share = num_experts // expert_parallel
    return range(dist_rank * share, (dist_rank + 1) * share)
