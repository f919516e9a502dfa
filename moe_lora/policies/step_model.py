"""How long a step takes, as a linear function of which adapters are in it.

Legend: S the requests of a step; t_i tokens and r_i rank of request i (rank 0: the base model); T = sum t_i;
R_a rank and T_a tokens of distinct adapter a; p = experts per token / experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_lora.core.config import LORA_KERNELS
from moe_lora.core.errors import ConfigError

FORMS = ("toppings", "full")
FEATURES = ("step", "tokens", "experts", "padded_ranks", "ranks", "adapter_ranks", "expert_ranks")
"""What times are linear in:

step            1: what every step costs
tokens          T
experts         1 - (1 - p)^T: share of the experts that the tokens choose, so of the base weights read
padded_ranks    T max r_i: rank rows that a padding kernel reads (Toppings equation 2, BGMV)
ranks           sum t_i r_i: rank rows at true rank (Toppings equation 2, MBGMV)
adapter_ranks   sum R_a over distinct adapters: rows of dense adapter weights, each read once
expert_ranks    sum R_a (1 - (1 - p)^T_a): likewise of the experts that the adapter's tokens choose
"""
_TRUE_RANK = {"sgmv": "ranks", "mbgmv": "ranks", "bgmv": "padded_ranks"}


class StepRow(Protocol):
    """A request in a step.  lora_rank 0 and adapter None: the base model."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def lora_rank(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of it that the step computes: 1 in decode, its prompt's in prefill."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """A `StepRow`."""

    adapter: str | None
    lora_rank: int
    num_tokens: int = 1


def feature_names(kernel: str, form: str, phase: str) -> tuple[str, ...]:
    """The features that a model of this kernel uses.

    form "toppings": equation 2, alpha x + beta, and a term per token in prefill; x is `padded_ranks` of
    "bgmv", else `ranks` (the paper has no kernel like "sgmv").  form "full": all terms that the kernel has.
    phase: "decode" or "prefill".  Raises ConfigError for unknown names.
    """
    for name, value, allowed in (
        ("kernel", kernel, LORA_KERNELS),
        ("form", form, FORMS),
        ("phase", phase, ("decode", "prefill")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
    main = _TRUE_RANK[kernel]
    if form == "toppings":
        return ("step", main) if phase == "decode" else ("step", "tokens", main)
    return ("step", "tokens", "experts", main, "adapter_ranks", "expert_ranks")


def features(rows: Sequence[StepRow], expert_share: float) -> dict[str, float]:
    """All of `FEATURES` of a step; expert_share: p, 1 of a dense model."""
    num_tokens = largest = ranks = 0
    of_adapter: dict[str, tuple[int, int]] = {}
    for row in rows:
        num_tokens += row.num_tokens
        ranks += row.num_tokens * row.lora_rank
        largest = max(largest, row.lora_rank)
        if row.adapter is not None:
            before = of_adapter.get(row.adapter, (0, 0))[1]
            of_adapter[row.adapter] = row.lora_rank, before + row.num_tokens
    unused = 1.0 - expert_share
    return {
        "step": 1.0,
        "tokens": float(num_tokens),
        "experts": 1.0 - unused**num_tokens,
        "padded_ranks": float(num_tokens * largest),
        "ranks": float(ranks),
        "adapter_ranks": float(sum(rank for rank, _ in of_adapter.values())),
        "expert_ranks": sum(rank * (1.0 - unused**count) for rank, count in of_adapter.values()),
    }


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A performance model: times of decode and prefill steps of one base model, machine and LoRA kernel.

    decode_s, prefill_s: seconds per unit of each feature.  Raises ConfigError for unknown features and for
    coefficients that are negative or no numbers.  Source: Toppings, section 5 and equation 2.
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
        for phase in ("decode", "prefill"):
            known = feature_names(self.kernel, self.form, phase)
            for name, value in getattr(self, f"{phase}_s").items():
                if name not in known:
                    raise ConfigError(
                        f"{phase}_s has {name!r}, which the {self.form} model of {self.kernel} has not; "
                        f"it has {', '.join(known)}"
                    )
                if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                    raise ConfigError(f"{phase}_s[{name!r}]={value!r} must be a number of seconds >= 0")

    def decode_step_s(self, rows: Iterable[StepRow]) -> float:
        """DecPerf of Toppings Algorithm 1: seconds of a step with one token of each request; 0 for none."""
        return self._seconds(self.decode_s, [Row(row.adapter, row.lora_rank) for row in rows])

    def prefill_step_s(self, rows: Iterable[StepRow]) -> float:
        """PrePerf of Toppings Algorithm 1: seconds of a step with all these prompts; 0 for none."""
        return self._seconds(self.prefill_s, list(rows))

    def _seconds(self, coefficients: Mapping[str, float], rows: Sequence[StepRow]) -> float:
        if not rows:
            return 0.0
        found = features(rows, self.expert_share)
        return math.fsum(value * found[name] for name, value in coefficients.items())
