# SPDX-License-Identifier: Apache-2.0
"""Highest rate within the SLOs, coupled and beside a LoRA Server, simulated; see README.md.

python -m bench.lora_server.bench_rates --trace AZURE.csv --out FILE.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.harness.records import Recorder
from moe_lora.config.plan import WorkloadOptions
from moe_lora.provision.plan.memory import KNOWN_MODELS
from moe_lora.provision.replayed.running import SimRequest
from moe_lora.provision.replayed.system import simulate
from moe_lora.report.latency import SloTargets
from moe_lora.report.results import read_results
from moe_lora.workload.replay_plan import PlannedRequest, make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import read_trace

from .rate_systems import NUM_ADAPTERS, ZIPF_S, Setting, Systems, text_of

STEP = 1.06
"""Rates are powers of it."""
GUESS = 80
"""Power of the first rate: 106 requests/s."""
MOST = 160
WARM_UP_S, JUDGED_S = 15.0, 60.0
NUM_GPUS = (12, 16)
ARRIVALS = ("poisson", "trace")
SEEDS = (0, 1, 2)
SYSTEMS = {"coupled, kernels 1": 1.0, "coupled, kernels 2": 2.0, "server": 1.0}
"""Name -> time of an instance's LoRA kernels over the LoRA Server's."""
LATE = 0.05
_SLO = SloTargets()


class Requests(NamedTuple):
    """Requests by arrival, judged from since_s on."""

    planned: Sequence[PlannedRequest]
    since_s: float


def planned(trace: Trace, systems: Systems, arrivals: str, seed: int, power: int) -> Requests:
    """WARM_UP_S and JUDGED_S of requests at the rate STEP ** power.

    "trace": the trace's times, scaled to the rate.  seed: of adapters, of Poisson arrivals, and of the first
    request: each seed starts a third of the trace later.
    """
    rate = STEP**power
    number = round(rate * (WARM_UP_S + JUDGED_S))
    options = WorkloadOptions(request_rate_per_s=rate, seed=seed)
    if arrivals == "poisson":
        options = replace(options, arrivals="gamma", num_requests=number)
    found = make_plan(_around(trace, number, seed), options, systems.popularity)
    first_s, last_s = found[0].arrival_s, found[-1].arrival_s
    return Requests(found, first_s + (last_s - first_s) * WARM_UP_S / (WARM_UP_S + JUDGED_S))


def _around(trace: Trace, number: int, seed: int) -> Trace:
    """`number` requests from the seed's first one on, round the trace, with a mean gap between rounds."""
    requests, length = trace.requests, len(trace.requests)
    period_s = (requests[-1].arrival_s - requests[0].arrival_s) * length / max(1, length - 1)
    first = seed * length // len(SEEDS)

    def at(index: int) -> TraceRequest:
        rounds, place = divmod(index, length)
        return replace(requests[place], arrival_s=requests[place].arrival_s + rounds * period_s)

    return replace(trace, requests=tuple(map(at, range(first, first + number))))


def replayed(systems: Systems, setting: Setting, kernel_ratio: float, requests: Requests) -> dict[str, Any]:
    """Figures of the judged requests, and met: P95 decode TTFT and mean TPOT are within the SLOs.

    A replay ends at the miss, so that its figures are of a part.
    """
    judged = sum(one.arrival_s >= requests.since_s for one in requests.planned)
    late = 0

    def give_up(request: SimRequest) -> bool:
        nonlocal late
        late += request.arrival_s >= requests.since_s and request.decode_ttft_s > _SLO.ttft_s
        return late > LATE * judged + 1

    system = simulate(systems.config(setting, kernel_ratio), requests.planned, give_up)
    found = system.summary(requests.since_s)
    names = ("num_requests", "p95_decode_ttft_s", "mean_tpot_s", "admitted_at_once")
    met = not system.stopped and _within(found["p95_decode_ttft_s"], found["mean_tpot_s"])
    return {name: found[name] for name in names} | {"num_loads": system.num_loads, "met": met}


def _within(ttft_s: float, tpot_s: float | None) -> bool:
    return ttft_s <= _SLO.ttft_s and (tpot_s or 0.0) <= _SLO.tpot_s


def highest(is_met: Callable[[int], bool], guess: int) -> int:
    """The power with a miss at the next power; -1: 1 request/s is too much.

    A bracket in growing steps from the guess, and bisection.
    """
    step, low, high = 1, -1, MOST
    if is_met(guess):
        low = guess
        while low + step < MOST and is_met(low + step):
            low, step = low + step, 2 * step
        high = min(MOST, low + step)
    else:
        high = guess
        while high - step > low and not is_met(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def best(
    settings: Sequence[Setting], is_met: Callable[[Setting, int], bool], guess: int
) -> tuple[Setting, int]:
    """The setting of the highest power; a further setting must hold the next power."""
    chosen, power = settings[0], highest(partial(is_met, settings[0]), guess)
    for setting in settings[1:]:
        if power < MOST and is_met(setting, power + 1):
            chosen, power = setting, highest(partial(is_met, setting), power + 1)
    return chosen, power


class Cell:
    """One system of a model under one kind of arrivals."""

    def __init__(self, systems: Systems, trace: Trace, num_gpus: int, arrivals: str, name: str) -> None:
        self._systems, self._ratio = systems, SYSTEMS[name]
        self._settings = systems.served(num_gpus) if name == "server" else systems.coupled(num_gpus)
        self._requests = lru_cache(maxsize=16)(partial(planned, trace, systems, arrivals))
        self._points: dict[tuple[int, Setting, int], dict[str, Any]] = {}

    def seeds(self, power: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(config, result) of each seed: the best setting of the first seed, and its highest rate.

        power: where the search starts.
        """
        setting, power = best(self._settings, partial(self.is_met, SEEDS[0]), power)
        yield {"seed": SEEDS[0], "setting": asdict(setting)}, self._result(SEEDS[0], setting, power)
        for seed in SEEDS[1:]:
            found = highest(partial(self.is_met, seed, setting), max(0, power))
            yield {"seed": seed, "setting": asdict(setting)}, self._result(seed, setting, found)

    def is_met(self, seed: int, setting: Setting, power: int) -> bool:
        key = seed, setting, power
        if key not in self._points:
            requests = self._requests(seed, power)
            self._points[key] = replayed(self._systems, setting, self._ratio, requests)
        return bool(self._points[key]["met"])

    def _result(self, seed: int, setting: Setting, power: int) -> dict[str, Any]:
        points = {key: point for key, point in self._points.items() if key[0] == seed}
        return {
            "power": power,
            "rate_per_s": STEP**power if power >= 0 else 0.0,
            "replays": len(points),
            "points": [
                {"rate_per_s": STEP ** key[2]} | one for key, one in points.items() if key[1] == setting
            ],
        }


def _done(out: Path | None) -> set[tuple[Any, ...]]:
    found = read_results(out) if out is not None and out.exists() else []
    return {tuple(one["config"][key] for key in ("model", "num_gpus", "arrivals", "system")) for one in found}


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines file.")
@click.option("--trace", required=True, type=click.Path(dir_okay=False), help="Azure's code trace, CSV.")
@click.option(
    "--model", "models", multiple=True, default=[one.name for one in KNOWN_MODELS], help="Repeatable."
)
@click.option("--gpus", "budgets", multiple=True, type=int, default=NUM_GPUS, help="Repeatable.")
def main(out: Path | None, trace: str, models: Sequence[str], budgets: Sequence[int]) -> None:
    """One record per model, GPUs, arrivals, system and seed; those of FILE do not run again."""
    record, done, read = Recorder(out, kind="simulated"), _done(out), read_trace(trace)
    for num_gpus, arrivals, model in product(budgets, ARRIVALS, models):
        power = GUESS
        for name in SYSTEMS:
            cell = {"model": model, "num_gpus": num_gpus, "arrivals": arrivals, "system": name}
            if tuple(cell.values()) in done:
                continue
            more = {"num_adapters": NUM_ADAPTERS, "zipf": ZIPF_S, "trace": Path(trace).name}
            for config, result in list(
                Cell(Systems(model, read), read, num_gpus, arrivals, name).seeds(power)
            ):
                record(cell | more | config, result)
                power = result["power"]
                click.echo(
                    f"{' '.join(map(str, cell.values()))}, seed {config['seed']}: "
                    f"{result['rate_per_s']:.1f} requests/s, {result['replays']} replays, "
                    f"{text_of(Setting(**config['setting']))}"
                )


if __name__ == "__main__":
    main()
