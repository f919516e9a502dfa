# SPDX-License-Identifier: Apache-2.0
"""Performance models: a step's time, linear in its adapters, or from a transformer's shape.

Legend: t_i tokens and r_i rank of request i (base model: 0); T = sum t_i; R_a rank and T_a tokens of adapter
a; p = experts per token / experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from moe_lora.config import LORA_KERNELS, PERFORMANCE_FORMS
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape

FEATURES = ("step", "tokens", "experts", "padded_ranks", "ranks", "adapter_ranks", "expert_ranks")
"""Terms of a step's time:

step            1: constant
tokens          T
experts         1 - (1 - p)^T: share of base experts read
padded_ranks    T max r_i: rank rows of a padding kernel (Toppings equation 2, BGMV)
ranks           sum t_i r_i: rank rows at true rank (Toppings equation 2, MBGMV)
adapter_ranks   sum R_a: rows of dense adapter weights, once per adapter
expert_ranks    sum R_a (1 - (1 - p)^T_a): rows of the chosen experts' adapter weights
"""


class Row(NamedTuple):
    """One request of a step, or several of one adapter: only tokens count.

    lora_rank 0 and adapter None: the base model.  num_tokens: 1 in decode, the prompt's in prefill.
    """

    adapter: str | None
    lora_rank: int
    num_tokens: int = 1


class StepWork:
    """A step's rows, changed in constant time.  expert_share: p, 1 of a dense model."""

    def __init__(self, expert_share: float, rows: Iterable[tuple[str | None, int, int]] = ()) -> None:
        self.num_tokens = 0
        self._unused = 1.0 - expert_share
        self._ranks = 0
        self._tokens_of_rank: dict[int, int] = {}
        self._tokens_of: dict[str, int] = {}
        self._adapter_ranks = 0
        self._expert_ranks = 0.0
        self._change(rows, 1)

    def add(self, row: Row) -> None:
        self._change((row,), 1)

    def take(self, row: Row) -> None:
        """Remove a row equal to an added row."""
        self._change((row,), -1)

    @property
    def largest_rank(self) -> int:
        return max(self._tokens_of_rank, default=0)

    def features(self, more: Row | None = None) -> dict[str, float]:
        """All `FEATURES`, with an optional extra row."""
        return dict(zip(FEATURES, self.terms(more), strict=True))

    def terms(self, more: Row | None = None) -> tuple[float, ...]:
        """The values of `features`."""
        unused, num_tokens, ranks = self._unused, self.num_tokens, self._ranks
        adapter_ranks, expert_ranks = self._adapter_ranks, self._expert_ranks
        largest = max(self._tokens_of_rank, default=0)
        if more is not None:
            adapter, lora_rank, added = more
            num_tokens += added
            ranks += added * lora_rank
            if lora_rank > largest:
                largest = lora_rank
            if adapter is not None:
                before = self._tokens_of.get(adapter, 0)
                after = before + added
                adapter_ranks += lora_rank * ((after > 0) - (before > 0))
                expert_ranks += lora_rank * (unused**before - unused**after)
        experts = 1.0 - unused**num_tokens
        return 1.0, num_tokens, experts, num_tokens * largest, ranks, adapter_ranks, expert_ranks

    def _change(self, rows: Iterable[tuple[str | None, int, int]], sign: int) -> None:
        # One loop without calls: a router counts all adapters of an instance after changes.
        unused, tokens_of, tokens_of_rank = self._unused, self._tokens_of, self._tokens_of_rank
        for adapter, lora_rank, num_tokens in rows:
            if not num_tokens:
                continue
            num_tokens *= sign
            self.num_tokens += num_tokens
            self._ranks += num_tokens * lora_rank
            if left := tokens_of_rank.get(lora_rank, 0) + num_tokens:
                tokens_of_rank[lora_rank] = left
            else:
                del tokens_of_rank[lora_rank]
            if adapter is None:
                continue
            before = tokens_of.get(adapter, 0)
            if after := before + num_tokens:
                tokens_of[adapter] = after
            else:
                del tokens_of[adapter]
            self._adapter_ranks += lora_rank * ((after > 0) - (before > 0))
            self._expert_ranks += lora_rank * (unused**before - unused**after)
        if not self.num_tokens:
            self._expert_ranks = 0.0


def features(rows: Iterable[Row], expert_share: float) -> dict[str, float]:
    """All `FEATURES` of a step."""
    return StepWork(expert_share, rows).features()


PHASES = ("decode", "prefill")
_OF_RANKS = {"sgmv": "ranks", "mbgmv": "ranks", "bgmv": "padded_ranks"}


def feature_names(kernel: str, form: str, phase: str) -> tuple[str, ...]:
    """The features of a kernel's model.  Raises ConfigError for unknown names.

    form "toppings": equation 2, alpha x + beta, and a prefill term per token; x is `padded_ranks` of "bgmv",
    else `ranks` (no "sgmv" in the paper).  form "full": all terms of the kernel.
    """
    for name, value, allowed in (
        ("kernel", kernel, LORA_KERNELS),
        ("form", form, PERFORMANCE_FORMS),
        ("phase", phase, PHASES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
    main = _OF_RANKS[kernel]
    if form == "toppings":
        return ("step", main) if phase == "decode" else ("step", "tokens", main)
    return ("step", "tokens", "experts", main, "adapter_ranks", "expert_ranks")


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Times of decode and prefill steps of one base model, machine and LoRA kernel.

    decode_s, prefill_s: seconds per unit of each feature.  Raises ConfigError for unknown features and
    negative or nonfinite coefficients.  Source: Toppings, section 5 and equation 2.
    """

    kernel: str
    form: str
    expert_share: float
    decode_s: Mapping[str, float]
    prefill_s: Mapping[str, float]

    def __post_init__(self) -> None:
        if not 0 < self.expert_share <= 1:
            raise ConfigError(
                f"expert_share={self.expert_share} must be above 0 and at most 1 (1: no experts)"
            )
        for phase in PHASES:
            known = feature_names(self.kernel, self.form, phase)
            for name, value in getattr(self, f"{phase}_s").items():
                if name not in known:
                    raise ConfigError(
                        f"{phase}_s has {name!r}, which the {self.form} model of {self.kernel} has not; "
                        f"it has {', '.join(known)}"
                    )
                if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                    raise ConfigError(f"{phase}_s[{name!r}]={value!r} must be a number of seconds >= 0")

    @cached_property
    def coefficients(self) -> dict[str, list[float]]:
        """Seconds per unit of each of `FEATURES`, by phase."""
        each = {"decode": self.decode_s, "prefill": self.prefill_s}
        return {phase: [seconds.get(name, 0.0) for name in FEATURES] for phase, seconds in each.items()}

    def work(self, rows: Iterable[tuple[str | None, int, int]] = ()) -> StepWork:
        """A batch for `seconds`."""
        return StepWork(self.expert_share, rows)

    def seconds(self, phase: str, work: StepWork, more: Row | None = None) -> float:
        """Seconds of a step with an optional extra row; 0 without rows."""
        if more is None and not work.num_tokens:
            return 0.0
        return math.fsum(map(mul, self.coefficients[phase], work.terms(more)))

    def decode_step_s(self, rows: Iterable[Row]) -> float:
        """DecPerf of Toppings Algorithm 1: seconds with one token of each request; 0 without."""
        return self.seconds("decode", self.work(Row(row.adapter, row.lora_rank) for row in rows))

    def prefill_step_s(self, rows: Iterable[Row]) -> float:
        """PrePerf of Toppings Algorithm 1: seconds with all these prompts; 0 without."""
        return self.seconds("prefill", self.work(rows))


FOLD_PASSES, TAKE_OUT_PASSES = 3, 2
"""Passes over changed weights: for a merge W, W_a and the products; for an unmerge the originals and W."""


def bytes_per_rank(shape: ModelShape, itemsize: int) -> tuple[int, int]:
    """Bytes per LoRA rank on all usual sites: of dense sites, and of all experts."""
    parts = [0, 0]
    for site in map(shape.site, shape.default_targets):
        features = sum(site.in_features + out for out in site.out_features)
        num_copies = max(1, site.num_experts) * shape.layers_with[site.name]
        parts[site.is_routed] += features * num_copies * itemsize
    return parts[0], parts[1]


def expected_step_times(
    shape: ModelShape, itemsize: int, kernel: str, bytes_per_s: float, expert_parallel: int = 1
) -> StepModel:
    """Estimate: a step reads weights and adapters once."""
    dense_rank, expert_rank = bytes_per_rank(shape, itemsize)
    weights = [shape.vocab_size * shape.hidden_size * itemsize, 0]
    for site in shape.sites:
        num_bytes = site.in_features * site.total_out_features * max(1, site.num_experts) * itemsize
        weights[site.is_routed] += num_bytes * shape.layers_with[site.name]
    seconds = {
        "step": weights[0] / bytes_per_s,
        "experts": weights[1] / expert_parallel / bytes_per_s,
        "adapter_ranks": dense_rank / bytes_per_s,
        "expert_ranks": expert_rank / expert_parallel / bytes_per_s,
    }
    assert set(seconds) <= set(feature_names(kernel, "full", "decode"))
    share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
    return StepModel(kernel=kernel, form="full", expert_share=share, decode_s=seconds, prefill_s=seconds)


def expected_swap_times(
    num_bytes: Callable[[Hashable], int], bytes_per_s: float
) -> Callable[[Hashable, Hashable], float]:
    """Estimate of merges.  num_bytes: of changed weights."""

    def seconds(before: Hashable, after: Hashable) -> float:
        out = 0 if before is None else TAKE_OUT_PASSES * num_bytes(before)
        return (out + (0 if after is None else FOLD_PASSES * num_bytes(after))) / bytes_per_s

    return seconds


@dataclass(frozen=True, kw_only=True)
class TransformerTime:
    """step = fixed_s + max(FLOPs / flops_per_s, bytes / bytes_per_s) (roofline) + delta_row_s per delta.

    FLOPs: 2 num_params per token, and 4 num_layers hidden_size per token and attended token.  Bytes: weights
    once, attended KV of decode rows, each used adapter once.  dtype_bytes: per weight, the mean of mixed
    formats.  flops_per_s, bytes_per_s: reached, not peak; of all devices.  delta_row_s: a decode row's deltas
    in all layers; prompt_delta: factor for a prompt row.
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
        """Seconds of a step.

        attended: pairs of a row and an attended token.  decode_context: context tokens of decode rows.
        num_deltas: of all rows and layers.
        """
        if not num_tokens:
            return 0.0
        compute_s = (self.flops(num_tokens) + self.attention_flops * attended) / self.flops_per_s
        read = self.num_params * self.dtype_bytes + decode_context * self.kv_token_bytes + adapter_bytes
        return self.fixed_s + max(compute_s, read / self.bytes_per_s) + num_deltas * self.delta_row_s

    def step_model(self, lora_ranks: float, adapter_bytes: float) -> StepModel:
        """A performance model without context terms.

        lora_ranks, adapter_bytes: of each adapter.
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
