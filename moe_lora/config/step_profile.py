"""How long the stages of a decode step take on another device, for an engine that emulates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moe_lora.core.errors import ConfigError


class Stage(Protocol):
    """A part of a layer."""

    def seconds(self, num_rows: float) -> float:
        """For so many decode rows; 0 for none."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """seconds(T) = max(least_s, fixed_s + per_row_s T) for T decode rows; 0 for none."""

    fixed_s: float = 0.0
    per_row_s: float = 0.0
    least_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_row_s", "least_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"stage time {name}={getattr(self, name)} must be a number of seconds >= 0")

    def seconds(self, num_rows: float) -> float:
        return max(self.least_s, self.fixed_s + self.per_row_s * num_rows) if num_rows else 0.0


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Stage times of one layer of the served model, as the emulated device would need them.

    attention: all of a layer but its experts.  experts: the base GEMMs of its experts.  lora: the deltas,
    where they are computed: after the base GEMM on an instance without LoRA Server, else by the server, once
    per instance.  transfer: inputs to the server and deltas back; unused without one.  overlap: the remote
    call runs beside the base GEMM; False: the base GEMM begins when the deltas are there.  Prefill rows
    take no time: they are another device's (prefill and decode apart, InfiniLoRA section 2.1).
    """

    attention: Stage = StageTime()
    experts: Stage = StageTime()
    lora: Stage = StageTime()
    transfer: Stage = StageTime()
    overlap: bool = True
