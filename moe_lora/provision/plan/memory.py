# SPDX-License-Identifier: Apache-2.0
"""Capacity of adapters and of KV; queues of adapter loads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import lambertw

from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout
from moe_lora.core.shape import DEFAULT_TARGETS, MAX_CUDA_LORA_RANK, ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.core.weight_format import WeightFormat
from moe_lora.families import shape_of
from moe_lora.provision.device_profile import Gpu

_KNOWN = Path(__file__).parents[1] / "known_models.json"
"""InfiniLoRA's table 3: parts of config.json, and settings."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """Layers, experts, top-k, LoRA rank and GPUs per instance of table 3; other sizes are published."""

    name: str
    shape: ModelShape
    lora_rank: int
    instance_gpus: int
    note: str = ""


def base_parameters(shape: ModelShape) -> int:
    """Weights of the base model: embedding, output head, and per layer attention, gate, MLP and two norms.

    Leaves out biases, and norms inside attention (below 0.1 %).
    """
    heads = shape.num_heads + shape.num_kv_heads
    layer = 2 * shape.hidden_size * shape.head_dim * heads + 2 * shape.hidden_size
    layer += max(1, shape.num_experts) * 3 * shape.hidden_size * shape.intermediate_size
    layer += shape.num_experts * shape.hidden_size
    return shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size


def base_bytes(shape: ModelShape, weights: WeightFormat, copies: int = 1) -> float:
    """Bytes of the base model; other parts keep the model's dtype."""
    plain = 8.0 * shape.dtype_bytes
    heads = shape.num_heads + shape.num_kv_heads
    attention = shape.num_layers * 2 * shape.hidden_size * shape.head_dim * heads
    experts = shape.num_layers * max(1, shape.num_experts) * 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size if weights.head else 0
    in_format = (copies * attention + head) * (weights.attention_bits or plain)
    in_format += experts * (weights.expert_bits or plain)
    return (in_format + (base_parameters(shape) - attention - head - experts) * plain) / 8


def shard_of(shape: ModelShape, gpus: int) -> ModelShard:
    """A GPU's part; attention is whole if heads can't be divided.  Raises ConfigError."""
    if not shape.num_experts:
        return ModelShard(shape, gpus)
    with suppress(ConfigError):
        return ModelShard(shape, gpus, gpus)
    return ModelShard(shape, 1, gpus)


def known_model(name: str) -> KnownModel:
    """The named model, in any case.  Raises ConfigError if unknown."""
    for model in KNOWN_MODELS:
        if model.name.lower() == name.lower():
            return model
    raise ConfigError(
        f"model {name!r} is neither a folder with a config.json nor a known name; "
        f"known are {', '.join(model.name for model in KNOWN_MODELS)}"
    )


def _known_models() -> tuple[KnownModel, ...]:
    rows = json.loads(_KNOWN.read_text(encoding="utf-8"))
    return tuple(
        KnownModel(name=name, shape=shape_of(row.pop("config")), **row) for name, row in rows.items()
    )


KNOWN_MODELS = _known_models()

FORMS = ("separate", "shared")
BLOCK_TOKENS = 16
_EXPERT_TARGETS = ("gate_up", "down")


@dataclass(frozen=True, kw_only=True)
class AdapterMix:
    """Adapters of a workload.  Raises ConfigError for shares that do not sum to 1."""

    ranks: tuple[tuple[int, float], ...]
    """(LoRA rank, share of requests)."""
    form: str = "separate"
    """Separate: gate and up have an A each; shared: one A (PEFT's fused form)."""
    adapter_ranks: tuple[tuple[int, float], ...] | None = None
    """(LoRA rank, share of adapters); memory counts the larger mean."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"adapter form={self.form!r} is unknown; choose one of {', '.join(FORMS)}")
        for shares in (self.ranks, self.adapter_ranks or self.ranks):
            _check_shares(shares)

    @property
    def mean_rank(self) -> float:
        """Mean over requests."""
        return sum(lora_rank * share for lora_rank, share in self.ranks)

    def largest(self) -> AdapterMix:
        """Only the largest rank of the mix."""
        return AdapterMix(ranks=((max(rank for rank, share in self.ranks if share), 1.0),), form=self.form)

    def adapter_bytes(self, shape: ModelShape, ep: int = 1, page_bytes: int = 1) -> float:
        """Mean bytes of a packed adapter on one of ep ranks."""
        return self._mean(shape, _EXPERT_TARGETS if shape.num_experts else DEFAULT_TARGETS, ep, page_bytes)

    def bytes_on_rank(self, shape: ModelShape, layout: Layout) -> float:
        """Mean bytes of an adapter on the fullest rank: adapter bytes * ceil(layers / y) / layers / x.

        Without experts, sites are dealt to x ranks.
        """
        if shape.num_experts:
            whole = self._mean(shape, _EXPERT_TARGETS, layout.ep)
        else:
            sites = [site.name for site in shape.sites]
            parts = [sites[first :: layout.ep] for first in range(layout.ep)]
            whole = max(self._mean(shape, part, 1) for part in parts)
        return whole * math.ceil(shape.num_layers / layout.pp) / shape.num_layers

    def _mean(self, shape: ModelShape, targets: Sequence[str], ep: int, page_bytes: int = 1) -> float:
        shared, unit = self.form == "shared", shape.num_layers * page_bytes

        def in_pages(rank: int) -> int:
            return -(-shape.adapter_bytes(rank, targets, shared, ep) // unit) * unit

        return max(
            sum(share * in_pages(rank) for rank, share in shares)
            for shares in (self.ranks, self.adapter_ranks or self.ranks)
        )


def _check_shares(shares: tuple[tuple[int, float], ...]) -> None:
    for lora_rank, share in shares:
        if not 1 <= lora_rank <= MAX_CUDA_LORA_RANK:
            raise ConfigError(f"lora_rank={lora_rank} must be between 1 and {MAX_CUDA_LORA_RANK}, as on GPUs")
        if not 0 <= share <= 1:
            raise ConfigError(f"share {share} of rank {lora_rank} must be between 0 and 1")
    if not shares or not math.isclose(sum(share for _, share in shares), 1.0, rel_tol=1e-6):
        raise ConfigError(f"shares of the ranks {list(shares)} must sum to 1")


def bytes_text(num_bytes: float) -> str:
    """In GB, or MB below 0.1 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def server_bytes(gpu: Gpu) -> float:
    """Adapter memory of a rank, rounded down to three digits of GB."""
    usable_gb = gpu.memory_bytes * gpu.server_memory_share / 1e9
    unit = 10.0 ** (math.floor(math.log10(usable_gb)) - 2)
    return round(math.floor(usable_gb / unit) * unit, 9) * 1e9


STEPS_TO_FIRST_TOKEN = 2.95
"""Steps in P95 decode TTFT: 0.95 of the current, one for the lease, the first."""
_TAIL = 0.05
_PRECISION = 1e-6
_MAX_ROUNDS = 1000


def miss_share(probabilities: NDArray[np.float64], slots: int) -> float:
    """Share of requests whose adapter is in none of `slots` LRU slots: sum_i p_i exp(-p_i W).

    W solves sum_i (1 - exp(-p_i W)) = slots; 0 if every adapter has a slot.  probabilities: [N], sum 1.
    Source: Che et al., "Hierarchical Web caching systems" (IEEE JSAC 2002).
    """
    rates = probabilities[probabilities > 0]
    if slots >= len(rates):
        return 0.0
    if slots < 1:
        return 1.0

    def too_many(log_window: float) -> float:
        return float(-np.expm1(-rates * math.exp(log_window)).sum()) - slots

    low = high = math.log(slots / rates.sum())
    while too_many(high) < 0:
        high += 1.0
    window = math.exp(brentq(too_many, low, high)) if high > low else math.exp(low)
    return float((rates * np.exp(-rates * window)).sum())


@dataclass(frozen=True, kw_only=True)
class LoadQueue:
    """An M/D/1 queue of loads on a LoRA Server's links.

    Legend: lambda = loads_per_s, D = load_s, rho = lambda D, L instances, t seconds of a step, t0 without
    waits, l layers.  Backlog for rho < 1: P(> x) = exp(-theta x), lambda (exp(theta D) - 1) = theta
    (Lundberg, Kingman).
    """

    loads_per_s: float
    load_s: float
    misses: float
    """Share of requests with a load."""

    @property
    def utilisation(self) -> float:
        """rho, the busy share of the links."""
        return self.loads_per_s * self.load_s

    @property
    def wait_s(self) -> float:
        """Mean time before a load starts, rho D / (2 (1 - rho)); infinite for rho >= 1."""
        rho = self.utilisation
        return rho * self.load_s / (2 * (1 - rho)) if rho < 1 else math.inf

    @property
    def decay_per_s(self) -> float:
        """theta; 0 for rho >= 1, infinite without loads."""
        rho = self.utilisation
        if rho >= 1:
            return 0.0
        if rho <= 0:
            return math.inf
        # z = theta D solves exp(z) = 1 + z / rho, so that -(rho + z) exp(-(rho + z)) = -rho exp(-rho).
        return (-rho - float(lambertw(-rho * math.exp(-rho), -1).real)) / self.load_s

    def step_s(self, unhindered_s: float, num_instances: int, num_layers: int) -> float:
        """t of a step with t0 = unhindered_s; infinite for rho >= 1.

        t = t0 + (1 - exp(-lambda t / L)) exp(-theta (t + t0 (1 - 1/l))) / theta.
        """
        decay = self.decay_per_s
        if decay == 0.0:
            return math.inf
        step_s = unhindered_s
        for _ in range(_MAX_ROUNDS):
            asks = -math.expm1(-self.loads_per_s * step_s / num_instances)
            slack_s = step_s + unhindered_s * (1 - 1 / num_layers)
            longer_s = unhindered_s + asks * math.exp(-decay * slack_s) / decay
            if abs(longer_s - step_s) <= _PRECISION * step_s:
                break
            step_s = (step_s + longer_s) / 2
        return step_s

    def p95_ttft_s(self, step_s: float, num_instances: int) -> float:
        """P95 TTFT with a slot: of steps alone, or the backlog's quantile and two steps."""
        unhindered_s = STEPS_TO_FIRST_TOKEN * step_s
        decay = self.decay_per_s
        if decay == 0.0 or math.isinf(step_s):
            return math.inf
        beside = -math.expm1(-self.loads_per_s * step_s / num_instances)
        waiting = self.misses + (1 - self.misses) * beside
        if waiting <= _TAIL or math.isinf(decay):
            return unhindered_s
        return max(unhindered_s, 2 * step_s + math.log(waiting / _TAIL) / decay)
