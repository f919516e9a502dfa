# SPDX-License-Identifier: Apache-2.0
"""How long the stages of a step take on another device, and the settings of an engine that emulates it."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class StageTime(Settings):
    """seconds(T) = max(least_s, fixed_s + per_row_s T) for T decode rows; 0 for none."""

    fixed_s: float = setting(0.0, least=0)
    per_row_s: float = setting(0.0, least=0)
    least_s: float = setting(0.0, least=0)

    def seconds(self, num_rows: float) -> float:
        return max(self.least_s, self.fixed_s + self.per_row_s * num_rows) if num_rows else 0.0


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Stage times of one layer of the served model, as the emulated device would need them.

    attention: all of a layer but its experts.  experts: the base GEMMs of its experts.  lora: the deltas,
    where they are computed: after the base GEMM on an instance without LoRA Server, else by the server, once
    per instance.  transfer: inputs to the server and deltas back; unused without one.  overlap: the remote
    call runs beside the base GEMM; False: the base GEMM begins when the deltas are there.  prefill: a whole
    layer for the prompt rows of a step, which by default take no time: they are another device's (prefill and
    decode apart, InfiniLoRA section 2.1).
    """

    attention: StageTime = StageTime()
    experts: StageTime = StageTime()
    lora: StageTime = StageTime()
    transfer: StageTime = StageTime()
    prefill: StageTime = StageTime()
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class EmulationConfig(Settings):
    """Another device's times, emulated on this machine by sleeping; for comparisons."""

    step_profile: StepProfile | None = setting(None, unset="none")
    """Times of a step's stages, the LoRA Server's included."""
    load_gb_per_s: float | None = setting(None, above=0, unset="none")
    """Upper bound on the rate of an instance's copies to and from its device, adapters and KV, in 10^9 bytes
    per second."""
    blocking_loads: bool = False
    """Start no step during a copy of an adapter to the device, as in S-LoRA."""
    host_slowdown: float = setting(1.0, least=1)
    """Factor on a host worker's time, as for a part of a core."""
