"""How many adapters fit on a LoRA Server, and how many requests' KV beside an instance's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_lora.core.errors import ConfigError
from .known_models import base_parameters
from moe_lora.core.shape import DEFAULT_TARGETS, MAX_LORA_RANK, ModelShape
from moe_lora.dist.lora_server.protocol.partition import Layout

from moe_lora.provision.profile import Gpu

FORMS = ("separate", "shared")
_EXPERT_TARGETS = ("gate_up", "down")


@dataclass(frozen=True, kw_only=True)
class AdapterMix:
    """The adapters of a workload: (LoRA rank, share of requests) pairs, and their form.

    adapter_ranks: (LoRA rank, share of adapters) pairs, where they are not the same.  Which adapters are
    resident lies between the two: nearly those of the last requests while few fit, all of them in the end.
    So memory counts the larger mean of the two, computation the mean over requests.

    form: "separate": gate and up of an expert have an A each; "shared": one A for both (PEFT's fused form).
    On a model with experts an adapter has gate_up and down of every expert, else all of a layer's matrices:
    what a LoRA Server holds by default.  Raises ConfigError for shares that do not sum to 1.
    """

    ranks: tuple[tuple[int, float], ...]
    form: str = "separate"
    adapter_ranks: tuple[tuple[int, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"adapter form={self.form!r} is unknown; choose one of {', '.join(FORMS)}")
        for shares in (self.ranks, self.adapter_ranks or self.ranks):
            _check_shares(shares)

    @property
    def mean_rank(self) -> float:
        """Over requests."""
        return sum(lora_rank * share for lora_rank, share in self.ranks)

    def largest(self) -> AdapterMix:
        """Only the largest rank of the mix."""
        return AdapterMix(ranks=((max(rank for rank, share in self.ranks if share), 1.0),), form=self.form)

    def adapter_bytes(self, shape: ModelShape) -> float:
        """Mean bytes of a packed adapter, over requests or over adapters, whichever is more."""
        targets = _EXPERT_TARGETS if shape.num_experts else DEFAULT_TARGETS
        return self._mean(shape, targets, 1)

    def bytes_on_rank(self, shape: ModelShape, layout: Layout) -> float:
        """Mean bytes of an adapter on the fullest rank of the layout.

        adapter bytes * ceil(layers / y) / layers / x for a model with experts; without, its sites are dealt
        out over the x ranks.
        """
        if shape.num_experts:
            whole = self._mean(shape, _EXPERT_TARGETS, layout.ep)
        else:
            sites = [site.name for site in shape.sites]
            parts = [sites[first :: layout.ep] for first in range(layout.ep)]
            whole = max(self._mean(shape, part, 1) for part in parts)
        return whole * math.ceil(shape.num_layers / layout.pp) / shape.num_layers

    def _mean(self, shape: ModelShape, targets: Sequence[str], ep: int) -> float:
        shared = self.form == "shared"
        return max(
            sum(share * shape.adapter_bytes(rank, targets, shared, ep) for rank, share in shares)
            for shares in (self.ranks, self.adapter_ranks or self.ranks)
        )


def _check_shares(shares: tuple[tuple[int, float], ...]) -> None:
    for lora_rank, share in shares:
        if not 1 <= lora_rank <= MAX_LORA_RANK:
            raise ConfigError(f"lora_rank={lora_rank} must be between 1 and {MAX_LORA_RANK}")
        if not 0 <= share <= 1:
            raise ConfigError(f"share {share} of rank {lora_rank} must be between 0 and 1")
    if not shares or not math.isclose(sum(share for _, share in shares), 1.0, rel_tol=1e-6):
        raise ConfigError(f"shares of the ranks {list(shares)} must sum to 1")


def bytes_text(num_bytes: float) -> str:
    """In GB, or MB where that is less than 0.1 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def server_bytes(gpu: Gpu) -> float:
    """Of a LoRA Server's rank for adapters, rounded down to three digits of GB: what a plan's file says."""
    usable_gb = gpu.memory_bytes * gpu.server_memory_share / 1e9
    unit = 10.0 ** (math.floor(math.log10(usable_gb)) - 2)
    return round(math.floor(usable_gb / unit) * unit, 9) * 1e9


def server_slots(gpu: Gpu, shape: ModelShape, mix: AdapterMix, layout: Layout) -> int:
    """Adapters of mean size that fit on a LoRA Server of this layout."""
    return int(server_bytes(gpu) / mix.bytes_on_rank(shape, layout))


def kv_requests(gpu: Gpu, shape: ModelShape, instance_gpus: int, context_tokens: float) -> float:
    """Requests whose KV fits beside an instance's weights.  Raises ConfigError if the weights don't fit."""
    usable = instance_gpus * gpu.memory_bytes * gpu.instance_memory_share
    weights = base_parameters(shape) * shape.dtype_bytes
    if weights >= usable:
        raise ConfigError(
            f"the base model's {weights / 1e9:.1f} GB exceed what {instance_gpus} GPUs give an instance "
            f"({usable / 1e9:.1f} GB) by {(weights - usable) / 1e9:.1f} GB; raise --instance-gpus"
        )
    return (usable - weights) / (shape.kv_bytes_per_token() * context_tokens)
