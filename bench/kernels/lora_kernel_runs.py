# SPDX-License-Identifier: Apache-2.0
"""Checks and times every contestant of a case; its records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.harness.interleave import interleave, ratio

from .lora_kernel_cases import Case
from .lora_kernel_clock import Passes, Rates
from .lora_kernel_peers import Contestant, NotApplicable, Phases
from .lora_kernel_plan import CaseSpec

Found = tuple[dict[str, Any], dict[str, Any]]
"""Config and result of a record."""
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Largest error against the fp32 reference, by the largest value of the delta."""
_OTHERS = ("baseline", "peer", "outside")
_SLOW_PASS_S, _SLOW_ROUNDS = 0.1, 3


def check(case: Case, phases: Phases) -> float:
    """Largest relative error over the ways to get a delta: in one call, and by its phases.

    Raises NotApplicable for an error above TOLERANCE: wrong results are not timed.
    """
    ways: list[tuple[str, ...]] = [("delta",)] if "delta" in phases else []
    if {"shrink", "expand"} <= set(phases):
        ways.append(("shrink", "expand"))
    if not ways:
        raise NotApplicable(f"offers {', '.join(phases)}; needed: delta, or shrink and expand")
    errors = []
    for way in ways:
        case.y[0].zero_()
        for phase in way:
            phases[phase](0)
        difference = (case.y[0].float() - case.exact).abs().max()
        errors.append(float(difference / case.exact.abs().max()))
        case.y[0].zero_()
        if not errors[-1] <= TOLERANCE[case.spec.dtype]:  # a NaN is wrong too
            raise NotApplicable(f"wrong: relative error {errors[-1]:.1e} of {' and '.join(way)}")
    return max(errors)


class CaseRun:
    """All contestants of one case, prepared and checked."""

    def __init__(self, case: Case, contestants: Sequence[Contestant]) -> None:
        self.case = case
        self.errors: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.passes: dict[tuple[str, str], Passes] = {}
        self._roles = {contestant.name: contestant.role for contestant in contestants}
        for contestant in contestants:
            try:
                phases = contestant.phases(case)
                self.errors[contestant.name] = check(case, phases)
            except NotApplicable as reason:
                self.refused[contestant.name] = str(reason)
                continue
            self._prepare(contestant.name, phases)

    def _prepare(self, name: str, phases: Phases) -> None:
        graph = self.case.spec.group != "prefill"
        for phase in self.case.spec.phases:
            if phase in phases:
                before = phases.get("shrink") if phase == "expand" else None
                self.passes[phase, name] = Passes(
                    phases[phase], self.case.num_copies, self.case.device, graph, before
                )

    def measure(self, rates: Rates, rounds: int) -> list[Found]:
        """One record per phase and contestant, refused ones included."""
        turns: dict[str, tuple[Passes, int, int]] = {
            name: (passes, 1, rounds) for name, passes in rates.contestants.items()
        }
        for (phase, name), passes in self.passes.items():
            slow = passes.first_s > _SLOW_PASS_S and self._roles[name] in ("peer", "outside")
            turns[f"{phase}/{name}"] = (passes, passes.num_passes, _SLOW_ROUNDS if slow else rounds)
        times = interleave(turns, rounds)
        records = [
            self._record(phase, name, times, rates)
            for phase in self.case.spec.phases
            for name in self._roles
            if (phase, name) in self.passes
        ]
        refused = [
            (self._config("delta", name, None), {"refused": reason}) for name, reason in self.refused.items()
        ]
        return records + refused

    def _config(self, phase: str, name: str, passes: Passes | None) -> dict[str, Any]:
        return {
            **describe(self.case.spec),
            "bench": "lora_kernels",
            "device": self.case.device.type,
            "num_pairs_touched": len(self.case.pairs),
            "num_adapters_touched": len({slot for slot, _ in self.case.pairs}),
            "num_copies": self.case.num_copies,
            "num_threads": torch.get_num_threads() if self.case.device.type == "cpu" else None,
            "phase": phase,
            "kernel": name,
            "role": self._roles[name],
            "timed_by": None if passes is None else passes.timed_by,
        }

    def _record(self, phase: str, name: str, times: dict[str, list[float]], rates: Rates) -> Found:
        copies = self.case.num_copies
        own = [seconds / copies for seconds in times[f"{phase}/{name}"]]
        work = self.case.work
        found = speeds(own, work.bytes[phase], work.flops[phase], times, rates)
        if self._roles[name] == "ours":
            others = (other for at, other in self.passes if at == phase and self._roles[other] in _OTHERS)
            found["speedup_over"] = {
                other: ratio(times[f"{phase}/{other}"], times[f"{phase}/{name}"]) for other in others
            }
            found["outside"] = [o for o in found["speedup_over"] if self._roles[o] == "outside"]
        found["relative_error"] = self.errors[name]
        return self._config(phase, name, self.passes[phase, name]), found


def describe(spec: CaseSpec) -> dict[str, Any]:
    """The case as a record names it."""
    site = spec.shape.site
    return {
        "case": spec.title,
        "group": spec.group,
        "model": spec.shape.model,
        "site": site.name,
        "in_features": site.in_features,
        "out_features": list(site.out_features),
        "num_experts": site.num_experts,
        "top_k": spec.shape.top_k,
        "num_rows": spec.num_rows,
        "num_adapters": spec.num_adapters,
        "popularity": spec.popularity,
        "lora_ranks": list(spec.lora_ranks),
        "equal_ranks": spec.equal_ranks,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "scale": spec.scale,
    }


def speeds(
    own: Sequence[float], num_bytes: int, flops: int, times: dict[str, list[float]], rates: Rates
) -> dict[str, Any]:
    """Time, rates, and their shares of the machine's rates in the same rounds.

    The bound is the longer of bytes over bandwidth (CPU: read, GPU: copy) and flops over the GEMM rate.
    """
    rate = {name: [amount / s for s in times[name]] for name, amount in rates.amounts.items()}
    memory = "read" if "read" in rate else "copy"
    memory_s = num_bytes / statistics.median(rate[memory])
    compute_s = flops / statistics.median(rate["gemm"])
    time_s = statistics.median(own)

    def share(amount: int, name: str) -> dict[str, float]:
        return ratio([amount / seconds for seconds in own], rate[name])

    shares = {name: share(flops if name == "gemm" else num_bytes, name) for name in rate}
    bound = memory if memory_s >= compute_s else "gemm"
    return {
        "time_ms": time_s * 1e3,
        "time_ms_rounds": [seconds * 1e3 for seconds in own],
        "num_pairs": len(own),
        "min_bytes": num_bytes,
        "bytes_per_s": num_bytes / time_s,
        "flops": flops,
        "flops_per_s": flops / time_s,
        **{f"{name}_per_s": statistics.median(values) for name, values in rate.items()},
        **{f"of_{name}": found for name, found in shares.items()},
        "bound": "compute" if bound == "gemm" else "memory",
        "of_bound": shares[bound],
    }
