# SPDX-License-Identifier: Apache-2.0
"""`moe-lora operating-points`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config import EngineConfig
from moe_lora.config.engine import QUANTISATION

from .errors import user_errors
from .options import WholeNumbers, refuse_given, setting_options

if TYPE_CHECKING:
    from moe_lora.provision.operating_points import OperatingPoint, PointLoad, RateRun, SloGoal

_OVERLOAD_TTFTS = 3.0
"""A wait of this many SLO TTFTs stops a run."""

_INTERRUPTED = "Ctrl-C stopped the search"
_MACHINE = ("device", "dtype", "num_threads", "eager", *QUANTISATION)
_ENGINE = ("lora_kernel", "max_num_seqs", "max_num_batched_tokens", *_MACHINE)
"""Engine settings with an option here."""


@setting_options(EngineConfig, *_ENGINE)
@click.command("operating-points")
@click.argument("model_dir", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option(
    "--simulate",
    "performance_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Simulate with a file of `profile-steps` instead of running MODEL_DIR.",
)
@click.option("--ranks", default="8,16,32,64,128", type=WholeNumbers(1, 512))
@click.option("--slo-ttft-s", required=True, type=float, help="P95 of TTFT.")
@click.option("--slo-tpot-s", required=True, type=float, help="Mean TPOT over requests.")
@click.option("--adapters", "num_adapters", default=8, type=int, help="Adapters of the rank.")
@click.option("--prompt-tokens", default=64, type=int)
@click.option("--output-tokens", default=32, type=int)
@click.option("--num-requests", default=100, type=int, help="Least requests of a run.")
@click.option(
    "--duration-s",
    type=float,
    help="Least length of a run.  [default: 20 TTFT + an answer at the SLO's TPOT]",
)
@click.option("--repeats", default=3, type=click.IntRange(1, 99), help="Largest number of runs at a rate.")
@click.option("--tolerance", default=0.05, type=float, help="Relative width of the result.")
@click.option("--start-per-s", default=4.0, type=float, help="First rate to try, in requests/s.")
@user_errors
def operating_points(model_dir: str | None, out: str, **options: Any) -> None:
    """Search, rank by rank, the highest rate at which the model in MODEL_DIR holds the SLO.

    Poisson arrivals, adapters of one rank only, random ones on attention and MLP, all resident.  Tokens are
    those of prompts and answers.  A run ends early when requests wait for 3 times the TTFT.
    """
    from moe_lora.report.results import check_targets, write_json

    check_targets([options["performance_file"]], out=out)
    if (model_dir is None) == (options["performance_file"] is None):
        raise click.UsageError("give either MODEL_DIR or --simulate FILE")
    if model_dir is None:
        refuse_given(_MACHINE, "--simulate takes times and weights' format from its FILE; leave {} out")
    content = found_points(model_dir, options)
    write_json(out, content)
    for rank, tokens_per_s in content["operating_points"].items():
        click.echo(f"rank {rank:>3}: {tokens_per_s:.1f} tokens/s ({content['kind']})")
    click.echo(f"operating points: {out}")
    for rank, text in content["failed"].items():
        click.echo(f"no point of rank {rank}: {text}", err=True)
    if content["failed"]:
        raise click.exceptions.Exit(130 if _INTERRUPTED in content["failed"].values() else 1)


def found_points(model_dir: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The file's content from a search of every rank, until Ctrl-C; "failed": ranks without a point.

    Raises SloError without any point.
    """
    from moe_lora.core.errors import MoeLoraError, SloError
    from moe_lora.provision.operating_points import PointLoad, SloGoal, find_operating_point, points_content
    from moe_lora.report.results import environment

    slo = SloGoal(ttft_s=options["slo_ttft_s"], tpot_s=options["slo_tpot_s"])
    names = ("prompt_tokens", "output_tokens", "num_adapters", "num_requests")
    duration_s = options["duration_s"]
    if duration_s is None:
        duration_s = 20 * slo.ttft_s + options["output_tokens"] * slo.tpot_s
    load = PointLoad(**{name: options[name] for name in names}, duration_s=duration_s)
    points: list[OperatingPoint] = []
    failed: dict[str, str] = {}
    for rank in options["ranks"]:
        try:
            with _runs(model_dir, rank, load, slo, options) as run:
                point = find_operating_point(
                    _told(run, rank),
                    lora_rank=rank,
                    tokens_per_request=load.tokens_per_request,
                    start_per_s=points[-1].rate_per_s if points else options["start_per_s"],
                    tolerance=options["tolerance"],
                    repeats=options["repeats"],
                )
            points.append(point)
        except (ValueError, OSError, RuntimeError, MoeLoraError) as error:
            failed[str(rank)] = str(error)
        except KeyboardInterrupt:
            if not points:
                raise
            failed[str(rank)] = _INTERRUPTED
            break
    if not points:
        raise SloError("; ".join(dict.fromkeys(failed.values())))
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    kind = "measured" if options["performance_file"] is None else "simulated"
    content = points_content(points, kind=kind, slo=slo, load=load, settings=settings, env=environment())
    return content | {"failed": failed}


@contextlib.contextmanager
def _runs(
    model_dir: str | None, rank: int, load: PointLoad, slo: SloGoal, options: dict[str, Any]
) -> Iterator[Callable[[float, int], RateRun]]:
    """Runs the load at a rate, on engine or simulator."""
    if model_dir is None:
        yield _simulation(rank, load, slo, options)
        return

    from moe_lora.profiling.step_times import OverloadError, engine_with_adapters, serve_open_loop
    from moe_lora.provision.operating_points import judge, overload

    click.echo(f"rank {rank}: building an engine and loading {load.num_adapters} adapters", err=True)
    names = [f"rank{rank}-{index}" for index in range(load.num_adapters)]
    core = engine_with_adapters(_engine_config(model_dir, load, options), dict.fromkeys(names, rank))

    warm_up = replace(load, num_requests=8 * len(names), duration_s=0.0).plan(1e3, names, 0)

    def run(rate_per_s: float, seed: int) -> RateRun:
        plan = load.plan(rate_per_s, names, seed)
        try:
            served = serve_open_loop(core, plan, longest_wait_s=_OVERLOAD_TTFTS * slo.ttft_s)
        except OverloadError as error:
            return overload(rate_per_s, error.waited_s)
        return judge(rate_per_s, served, slo)

    try:
        serve_open_loop(core, warm_up, longest_wait_s=float("inf"))
        yield run
    finally:
        core.close()


def _simulation(
    rank: int, load: PointLoad, slo: SloGoal, options: dict[str, Any]
) -> Callable[[float, int], RateRun]:
    from moe_lora.provision.operating_points import simulated_run
    from moe_lora.provision.performance_models import read_step_model

    model = read_step_model(options["performance_file"], kernel=options["lora_kernel"])
    limits = {name: options[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    return functools.partial(simulated_run, model, rank, load, slo, **limits)


def _told(run: Callable[[float, int], RateRun], rank: int) -> Callable[[float, int], RateRun]:
    """Reports each run on stderr."""

    def telling(rate_per_s: float, seed: int) -> RateRun:
        trial = run(rate_per_s, seed)
        found = "overloaded" if trial.overloaded else f"mean TPOT {trial.mean_tpot_s:.4f} s"
        click.echo(
            f"rank {rank}: {rate_per_s:.3g} requests/s: P95 TTFT {trial.p95_ttft_s:.3f} s, {found}: "
            f"{'holds' if trial.holds else 'fails'}",
            err=True,
        )
        return trial

    return telling


def _engine_config(model_dir: str, load: PointLoad, options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        **{name: options[name] for name in _ENGINE if name in options},
        max_model_len=load.tokens_per_request,
        prefix_caching=False,
    )
