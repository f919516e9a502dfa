# SPDX-License-Identifier: Apache-2.0
"""A server's highest rate within its SLO (LoRAServe, section IV-A)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from moe_lora.config.json_file import Positive, checked, read_object
from moe_lora.config.settings import Settings, setting
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import InstanceConfig, LocalConfig, SystemConfig
from moe_lora.timing.step_model import StepModel
from moe_lora.workload.replay_plan import PlannedRequest

_GROWTH = 2.0


class ServedRequest(Protocol):
    """A served request: seconds on one clock."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def first_token_s(self) -> float: ...
    @property
    def finish_s(self) -> float: ...
    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class SloGoal(Settings):
    """Upper limits: P95 of TTFT (arrival to first token), and mean TPOT."""

    SECTION = "slo"

    ttft_s: float = setting(above=0)
    tpot_s: float = setting(above=0)


@dataclass(frozen=True, kw_only=True)
class PointLoad(Settings):
    """Equal lengths, Poisson arrivals, adapters of one rank.

    A run has num_requests, or the arrivals of duration_s if more.
    """

    prompt_tokens: int = setting(least=1)
    output_tokens: int = setting(least=2)
    num_adapters: int = setting(least=1)
    num_requests: int = setting(least=2)
    duration_s: float = setting(least=0)

    @property
    def tokens_per_request(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    def plan(self, rate_per_s: float, names: Sequence[str], seed: int) -> list[PlannedRequest]:
        """Poisson arrivals, conditioned on the expected number."""
        rng = np.random.default_rng(seed)
        count = max(self.num_requests, math.ceil(rate_per_s * self.duration_s))
        arrivals = np.sort(rng.uniform(0.0, count / rate_per_s, size=count))
        chosen = rng.integers(len(names), size=count)
        return [
            PlannedRequest(i, float(at), names[int(name)], self.prompt_tokens, self.output_tokens)
            for i, (at, name) in enumerate(zip(arrivals, chosen, strict=True))
        ]


@dataclass(frozen=True, kw_only=True)
class RateRun:
    """Result of a run."""

    rate_per_s: float
    p95_ttft_s: float
    mean_tpot_s: float
    holds: bool
    overloaded: bool = False
    """Stopped after waits far beyond the SLO."""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Highest rate that held, and lowest failed rate."""

    lora_rank: int
    rate_per_s: float
    fails_at_per_s: float
    tokens_per_s: float
    trials: tuple[RateRun, ...]


def judge(rate_per_s: float, requests: Iterable[ServedRequest], slo: SloGoal) -> RateRun:
    """Judge requests by the SLO; skips the first tenth."""
    served = sorted(requests, key=lambda request: request.arrival_s)
    served = served[len(served) // 10 :]
    ttft = float(np.percentile([one.first_token_s - one.arrival_s for one in served], 95))
    tpot = float(np.mean([(one.finish_s - one.first_token_s) / (one.output_tokens - 1) for one in served]))
    holds = ttft <= slo.ttft_s and tpot <= slo.tpot_s
    return RateRun(rate_per_s=rate_per_s, p95_ttft_s=ttft, mean_tpot_s=tpot, holds=holds)


def overload(rate_per_s: float, waited_s: float) -> RateRun:
    return RateRun(rate_per_s=rate_per_s, p95_ttft_s=waited_s, mean_tpot_s=0.0, holds=False, overloaded=True)


def find_operating_point(
    run: Callable[[float, int], RateRun],
    *,
    lora_rank: int,
    tokens_per_request: int,
    start_per_s: float,
    tolerance: float = 0.05,
    repeats: int = 1,
    max_doublings: int = 20,
    max_halvings: int = 6,
) -> OperatingPoint:
    """Double or halve the rate to bracket the SLO, then bisect (geometrically) to within tolerance.

    run(rate, seed): a short run; a rate holds if more than half of `repeats` do.  Raises ConfigError for
    impossible settings, SloError without a bracket.
    """
    if not (0 < start_per_s < math.inf and tolerance > 0 and repeats >= 1):
        raise ConfigError(
            f"start_per_s={start_per_s}, tolerance={tolerance} and repeats={repeats} must be positive"
        )
    trials: list[RateRun] = []

    def holds(rate_per_s: float) -> bool:
        found = 0
        for seed in range(repeats):
            trials.append(run(rate_per_s, seed))
            found += trials[-1].holds
            if 2 * found > repeats or 2 * (seed + 1 - found) >= repeats:
                break
        return 2 * found > repeats

    low, high = _bracket(holds, start_per_s, (max_doublings, max_halvings), lora_rank, trials)
    while high / low - 1 > tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return OperatingPoint(
        lora_rank=lora_rank,
        rate_per_s=low,
        fails_at_per_s=high,
        tokens_per_s=low * tokens_per_request,
        trials=tuple(trials),
    )


def _bracket(
    holds: Callable[[float], bool],
    start_per_s: float,
    max_steps: tuple[int, int],
    lora_rank: int,
    trials: list[RateRun],
) -> tuple[float, float]:
    rate = start_per_s
    if holds(rate):
        for _ in range(max_steps[0]):
            rate *= _GROWTH
            if not holds(rate):
                return rate / _GROWTH, rate
        raise SloError(
            f"rank {lora_rank}: {rate:g} requests/s still hold the SLO; "
            "tighten it, or send more requests in a run, so that the server can fall behind"
        )
    for _ in range(max_steps[1]):
        rate /= _GROWTH
        if holds(rate):
            return rate, rate * _GROWTH
    last = trials[-1]
    raise SloError(
        f"rank {lora_rank}: not even {rate:g} requests/s hold the SLO (P95 TTFT {last.p95_ttft_s:.3g} s, "
        f"mean TPOT {last.mean_tpot_s:.3g} s); raise --slo-ttft-s or --slo-tpot-s, or lower --start-per-s"
    )


FORMAT = "moe-lora operating points"
KINDS = ("measured", "simulated")


def points_content(
    points: Sequence[OperatingPoint],
    *,
    kind: str,
    slo: SloGoal,
    load: PointLoad,
    settings: Mapping[str, Any],
    env: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of the file.  Raises ConfigError for an unknown kind."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return {
        "format": FORMAT,
        "kind": kind,
        "operating_points": {str(point.lora_rank): point.tokens_per_s for point in points},
        "slo": asdict(slo),
        "load": asdict(load),
        "searches": [asdict(point) for point in points],
        "settings": dict(settings),
        "env": dict(env),
    }


def read_operating_points(path: str | Path) -> dict[int, float]:
    """{rank: tokens/s} from a file of `moe-lora operating-points`, or plain {"rank": tokens/s}.

    Raises ConfigError with the fault.
    """
    content = read_object(path, "moe-lora operating-points MODEL_DIR --out FILE")
    if content.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{path}: format is not {FORMAT!r}; give a file of `moe-lora operating-points`")
    given = content.get("operating_points") if "format" in content else content
    points: dict[int, float] = checked(path, dict[Annotated[int, Field(ge=1)], Positive], given)
    if not points:
        raise ConfigError(f"{path}: it has no rank; it needs tokens/s of one or more")
    return dict(sorted(points.items()))


def simulated_run(
    model: StepModel,
    lora_rank: int,
    load: PointLoad,
    slo: SloGoal,
    rate_per_s: float,
    seed: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> RateRun:
    """A simulated instance with all adapters resident."""
    names = [str(index) for index in range(load.num_adapters)]
    config = SystemConfig(
        num_instances=1,
        instance=InstanceConfig(
            steps=model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        adapters=LocalConfig(capacity=load.num_adapters),
        lora_ranks=dict.fromkeys(names, lora_rank),
    )
    return judge(rate_per_s, simulate(config, load.plan(rate_per_s, names, seed)).requests, slo)
