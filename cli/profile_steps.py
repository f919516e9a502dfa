# SPDX-License-Identifier: Apache-2.0
"""`moe-lora profile-steps`."""

from __future__ import annotations

import contextlib
import time
from itertools import product
from pathlib import Path
from typing import Any

import click

from moe_lora.config import LORA_KERNELS, EngineConfig
from moe_lora.config.engine import WEIGHTS
from moe_lora.core.progress import progress

from .errors import user_errors
from .options import WholeNumbers, setting_options

LEAST_R2 = 0.9
"""Least R2 on held-out batches; the papers report 0.96."""
_MACHINE = ("device", "dtype", "num_threads", "eager", *WEIGHTS)
"""Engine settings with an option here."""


@setting_options(EngineConfig, *_MACHINE)
@click.command("profile-steps")
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option(
    "--lora-kernel",
    "kernels",
    multiple=True,
    default=(EngineConfig.lora_kernel,),
    type=click.Choice(LORA_KERNELS),
    help="May be given several times; engines are timed in turn.",
)
@click.option("--ranks", default="8,16,32,64,128", type=WholeNumbers(1, 512))
@click.option("--batches", default="1,2,4,8,16,32", type=WholeNumbers(1, 4096))
@click.option(
    "--adapters", "num_adapters", default=8, type=click.IntRange(1, 1024), help="Adapters of each rank."
)
@click.option(
    "--mixed",
    "num_mixed",
    default=48,
    type=click.IntRange(0, 10_000),
    help="Batches of drawn size and ranks.",
)
@click.option("--rounds", default=5, type=click.IntRange(1, 1000), help="Rounds of every batch.")
@click.option(
    "--decode-steps", default=4, type=click.IntRange(1, 64), help="Timed decode steps of each round."
)
@click.option(
    "--max-tokens",
    default=512,
    type=click.IntRange(1, 65536),
    help="Largest number of tokens of a prefill step.",
)
@click.option(
    "--quantile",
    default=0.5,
    type=click.FloatRange(0, 1),
    help="Quantile of a batch's samples; 0.5: median.  Lower values suit a shared machine.",
)
@click.option(
    "--processor-time",
    is_flag=True,
    help="Count processor time instead of wall time: for one CPU thread on a shared machine.",
)
@click.option(
    "--host-worker",
    is_flag=True,
    help="Time one host worker, prompts and loads too, for the choice between host worker and load.",
)
@click.option("--seed", default=0)
@click.option("--force", is_flag=True, help=f"Write models with R2 below {LEAST_R2:g} too.")
@user_errors
def profile_steps(model_dir: str, out: str, force: bool, host_worker: bool, **options: Any) -> None:
    """Time decode and prefill steps of the model in MODEL_DIR with adapters of several ranks.

    Adapters are random, on attention and MLP, all resident.  The file holds every batch's times, and
    performance models fitted to three quarters of the batches with R2 on the rest.  `serve --set
    front_end.performance_model=FILE` and `operating-points --simulate` read the file.  Models that tell the
    times badly (R2 below 0.9) are not written.
    (`moe-lora profile` times parts of a layer, for `provision`.)
    """
    from moe_lora.report.results import check_targets, write_json

    check_targets(out=out)
    host_tokens = host_prompt_tokens(model_dir, options["max_tokens"]) if host_worker else 0
    content = measured_models(model_dir, options)
    for line in summary_lines(content):
        click.echo(line)
    if not force:
        content["models"] = good_models(content["models"])
    if host_worker:
        content["host"] = measured_host(model_dir, options, host_tokens)
    write_json(out, content)
    if host_worker:
        errors = content["host"]["mean_errors"].items()
        click.echo("host times off on average: " + ", ".join(f"{what} {100 * x:.1f} %" for what, x in errors))
        for line in host_lines(out, options["ranks"]):
            click.echo(line)
    click.echo(f"performance models: {out}")


def measured_models(model_dir: str, options: dict[str, Any]) -> dict[str, Any]:
    """The file's content: batches on an engine per kernel."""
    from moe_lora.config import PERFORMANCE_FORMS
    from moe_lora.profiling.step_times import StepClock
    from moe_lora.provision.performance_models import (
        adapter_names,
        batches_to_time,
        check_enough,
        file_content,
        fit_model,
        measure,
    )
    from moe_lora.report.results import environment
    from moe_lora.timing.step_model import PHASES

    batches = batches_to_time(
        options["ranks"],
        options["batches"],
        num_adapters=options["num_adapters"],
        num_mixed=options["num_mixed"],
        max_tokens=options["max_tokens"],
        seed=options["seed"],
    )
    for kernel, form, phase in product(options["kernels"], PERFORMANCE_FORMS, PHASES):
        check_enough(batches, kernel, form, phase)
    adapters = adapter_names(options["ranks"], options["num_adapters"])
    with contextlib.ExitStack() as stack:
        clocks = {}
        for kernel in dict.fromkeys(options["kernels"]):
            click.echo(f"{kernel}: building an engine and warming it up", err=True)
            clock = StepClock(
                _engine_config(model_dir, kernel, options),
                adapters,
                options["decode_steps"],
                processor_time=options["processor_time"],
            )
            clocks[kernel] = stack.enter_context(contextlib.closing(clock))
        expert_share = next(iter(clocks.values())).expert_share
        with progress() as show:
            begun_s = time.monotonic()

            def on_progress(done: int, total: int) -> None:
                left_s = (time.monotonic() - begun_s) * (total - done) / done
                show(f"{done} of {total} batches timed, about {left_s:.0f} s to go", done, total)

            steps = measure(
                clocks, batches, options["rounds"], quantile=options["quantile"], on_progress=on_progress
            )
    fitted = [
        fit_model(steps[kernel], kernel=kernel, form=form, expert_share=expert_share)
        for kernel in steps
        for form in PERFORMANCE_FORMS
    ]
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    name = Path(model_dir).resolve().name
    weights = _engine_config(model_dir, options["kernels"][0], options).weights_name()
    return file_content(fitted, steps, model=name, settings=settings, env=environment(), weights=weights)


def host_prompt_tokens(model_dir: str, max_tokens: int) -> int:
    """A host worker's longest prompt: at most max_tokens and the model's length.

    Raises ConfigError without config.json.
    """
    from moe_lora.families import shape_of
    from moe_lora.profiling.host_times import TOKENS_BESIDE_PROMPT

    shape = shape_of(EngineConfig(model_dir=model_dir).hf_config())
    most = max(1, shape.max_position - TOKENS_BESIDE_PROMPT)
    if most < max_tokens:
        click.echo(
            f"host worker: prompts of up to {most} tokens, not --max-tokens {max_tokens}: the model's length "
            f"is {shape.max_position}",
            err=True,
        )
    return min(most, max_tokens)


def measured_host(model_dir: str, options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The file's `host` section: times of worker, prompts and loads."""
    from moe_lora.profiling.host_times import measure_host

    click.echo("host worker: building an engine and warming it up", err=True)
    with progress() as show:
        return measure_host(
            _engine_config(model_dir, options["kernels"][0], options),
            options["ranks"],
            max_tokens=max_tokens,
            num_rounds=options["rounds"],
            quantile=options["quantile"],
            on_progress=lambda done, total: show(f"{done} of {total} rounds of a rank timed", done, total),
        )


def host_lines(path: str, ranks: tuple[int, ...]) -> list[str]:
    """Break-even with one worker, and with all cores but one."""
    from moe_lora.core.processes import usable_cores
    from moe_lora.dist.host_workers.profile import read_host_times
    from moe_lora.profiling.host_times import break_even_lines

    return break_even_lines(read_host_times(path), ranks, sorted({1, max(1, usable_cores() - 1)}))


def good_models(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The models that fit held-out batches; drops bad models of the papers' coarser form.

    Raises ConfigError for a bad model of the full form.
    """
    from moe_lora.core.errors import ConfigError

    bad = [
        (model, phase, found["r2_held_out"])
        for model in models
        for phase, found in model["quality"].items()
        if found["r2_held_out"] is None or found["r2_held_out"] < LEAST_R2
    ]
    for model, phase, r2 in bad:
        if model["form"] == "full":
            raise ConfigError(
                f"the {model['kernel']} model tells {phase} times with R2 "
                f"{'-' if r2 is None else format(r2, '.4f')}, less than {LEAST_R2:g}, so nothing was "
                "written; time on an idle machine, with more --rounds or a lower --quantile, or give --force"
            )
        click.echo(f"left out: the {model['kernel']} model of form {model['form']}, {phase} R2 too low")
    return [model for model in models if all(model is not one for one, _, _ in bad)]


def summary_lines(content: dict[str, Any]) -> list[str]:
    """The models' fit to held-out batches, in lines."""
    lines = []
    for model in content["models"]:
        for phase, found in model["quality"].items():
            r2, error = found["r2_held_out"], found["mean_error"]
            shown = "-" if r2 is None else f"{r2:.4f}"
            lines.append(
                f"{model['kernel']:>5} {model['form']:<8} {phase:<7} R2 {shown} on "
                f"{found['num_held_out']} batches held out, {100 * error:.1f} % off on average"
            )
    return lines


def _engine_config(model_dir: str, kernel: str, options: dict[str, Any]) -> EngineConfig:
    from moe_lora.provision.performance_models import MAX_PROMPT_TOKENS

    largest = max(options["batches"])
    return EngineConfig(
        model_dir=model_dir,
        lora_kernel=kernel,
        **{name: options[name] for name in _MACHINE if name in options},
        max_num_seqs=largest,
        max_num_batched_tokens=max(largest, options["max_tokens"]),
        max_model_len=MAX_PROMPT_TOKENS + options["decode_steps"] + 2,
        prefix_caching=False,
    )
