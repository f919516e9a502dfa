"""Performance models: how long a step takes, as a linear function of which adapters are in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe_lora.config import LORA_KERNELS, PERFORMANCE_FORMS
from moe_lora.core.errors import ConfigError

from .step_work import Row, StepRow, StepWork

FORMS = PERFORMANCE_FORMS
PHASES = ("decode", "prefill")
_OF_RANKS = {"sgmv": "ranks", "mbgmv": "ranks", "bgmv": "padded_ranks"}


def feature_names(kernel: str, form: str, phase: str) -> tuple[str, ...]:
    """The features that a model of this kernel uses.

    form "toppings": equation 2, alpha x + beta, and a term per token in prefill; x is `padded_ranks` of
    "bgmv", else `ranks` (the paper has no kernel like "sgmv").  form "full": all terms that the kernel has.
    phase: "decode" or "prefill".  Raises ConfigError for unknown names.
    """
    for name, value, allowed in (
        ("kernel", kernel, LORA_KERNELS),
        ("form", form, FORMS),
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
    """A performance model: times of decode and prefill steps of one base model, machine and LoRA kernel.

    decode_s, prefill_s: seconds per unit of each feature.  Routers, the simulator and the search for
    operating points all ask this one.  Raises ConfigError for unknown features and for coefficients that are
    negative or no numbers.  Source: Toppings, section 5 and equation 2.
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

    def work(self, rows: Iterable[StepRow] = ()) -> StepWork:
        """A batch, to ask `seconds` about."""
        return StepWork(self.expert_share, rows)

    def seconds(self, phase: str, work: StepWork, more: StepRow | None = None) -> float:
        """Of a step of this phase over the batch, and one row more if given; 0 without any."""
        if more is None and not work.num_tokens:
            return 0.0
        found = work.features(more)
        coefficients = self.decode_s if phase == "decode" else self.prefill_s
        return math.fsum([value * found[name] for name, value in coefficients.items()])

    def decode_step_s(self, rows: Iterable[StepRow]) -> float:
        """DecPerf of Toppings Algorithm 1: seconds of a step with one token of each request; 0 for none."""
        return self.seconds("decode", self.work(Row(row.adapter, row.lora_rank) for row in rows))

    def prefill_step_s(self, rows: Iterable[StepRow]) -> float:
        """PrePerf of Toppings Algorithm 1: seconds of a step with all these prompts; 0 for none."""
        return self.seconds("prefill", self.work(rows))
