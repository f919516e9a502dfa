# SPDX-License-Identifier: Apache-2.0
"""`moe-lora provision`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from moe_lora.config import EngineConfig
from moe_lora.config.engine import QUANTISATION
from moe_lora.config.plan import PlanGoals

from .errors import input_errors
from .options import FORMAT, POPULARITY, ZIPF, read_files, setting_options

_FILE = click.Path(exists=True, dir_okay=False)
_OUT = click.Path(dir_okay=False)

_LOAD = (
    click.option("--trace", required=True, type=_FILE, help="Trace file: rate, lengths, adapters if named."),
    FORMAT,
    click.option("--request-rate", type=float, help="Requests per second.  [default: the trace's mean]"),
    click.option("--peak", is_flag=True, help="Rate: the trace's busiest minute; not with --request-rate."),
)
_ADAPTERS = (
    click.option(
        "--adapters",
        "--num-adapters",
        "num_adapters",
        type=click.IntRange(min=1),
        help="Number of adapters.  [default: the names in the trace or the file of counts]",
    ),
    ZIPF,
    POPULARITY,
    click.option(
        "--lora-rank",
        multiple=True,
        metavar="R[=SHARE]",
        help="Rank of the adapters, or ranks with their shares.  [default: the popularity's ranks, "
        "else table 3's for a named model]",
    ),
    click.option(
        "--adapter-form",
        type=click.Choice(["separate", "shared"]),
        default="separate",
        help="separate: gate and up have an A each; shared: one A for both.",
    ),
)
_CLUSTER = (
    click.option("--model", required=True, help="Folder with a config.json, or a name such as Mixtral-8x7B."),
    click.option("--hardware", default="hopper96", help="Profile: name, or JSON file."),
    click.option(
        "--assume",
        multiple=True,
        metavar="RATE=BYTES",
        help="A missing rate of the profile, load_bytes_per_s or net_bytes_per_s.",
    ),
    click.option("--instance-gpus", type=int, help="GPUs of an instance.  [default: table 3's, else 1]"),
)
_RESULT = (
    click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON."),
    click.option(
        "--verify",
        is_flag=True,
        help="Simulate the plan with new draws of arrivals and adapters; exit status 1, and no file, if "
        "the plan misses a target.",
    ),
    click.option("--report", type=_OUT, help="Write an HTML page with plots."),
    click.option("--out", type=_OUT, help="Write cluster.yaml for `moe-lora serve --config`."),
)


def _options(function: Any) -> Any:
    for option in reversed(_LOAD + _ADAPTERS + _CLUSTER + _RESULT):
        function = option(function)
    return function


@setting_options(PlanGoals)
@setting_options(EngineConfig, *QUANTISATION)
@click.command()
@_options
@input_errors
def provision(**options: Any) -> None:
    """The smallest cluster that holds a trace's load, prompts included, within two SLOs.

    Instances hold adapters beside their weights, and some may compute prompts alone, or a LoRA Server has
    the adapters (InfiniLoRA section 4.2): the cheapest kind is the answer.  Models of admission, steps and
    loads say where to look; the plan is the smallest cluster near there that holds in a simulation, which
    takes seconds.  Exit status: 0, a plan that holds; 1, none was found or --verify missed a target, and the
    first line says why; 2, options or files that can't be used.
    """
    from moe_lora.core.errors import SloError
    from moe_lora.provision.plan.compared import checked_plan
    from moe_lora.provision.plan.verify import NUM_REQUESTS
    from moe_lora.report.results import check_targets
    from moe_lora.workload.traces.records import Trace
    from moe_lora.workload.traces.traces import iter_trace, spread

    from .provision_inputs import model_dir_of, plan_inputs
    from .provision_result import plan_lines, replayed_share, verified

    check_targets(read_files(options), out=options["out"], report=options["report"])
    inputs, load = plan_inputs(options)
    for reason, count in load.dropped.items():
        click.echo(f"{load.path}: {count} rows left out: {reason}", err=True)
    part = spread(iter_trace(load.path, load.format), load.num_requests, NUM_REQUESTS)
    trace = Trace(load.path, load.format, tuple(part), load.dropped, load.duration_s > 0)
    try:
        plan = replayed_share(checked_plan(inputs, trace), load.num_requests, inputs)
    except SloError as error:
        raise click.ClickException(f"no plan holds this load: {error}") from error
    content, lines, missed = asdict(plan), plan_lines(plan), ""
    if options["verify"]:
        found, shown, missed = verified(inputs, plan, trace)
        content |= found
        lines += shown
    if missed:
        lines.insert(0, missed)
    click.echo(json.dumps(content, indent=1) if options["as_json"] else "\n".join(lines))
    if options["out"] is not None and not missed:
        _write_yaml(options, plan, model_dir_of(options["model"]))
    if options["report"] is not None:
        from moe_lora.provision.admission.admitted import iar_curves
        from moe_lora.report.html import write_plan_report

        batch = plan.global_batch * inputs.adapter_share
        if plan.kind == "coupled":
            batch /= plan.instances - plan.prefill_instances
        curves = iar_curves(inputs.probabilities, batch, 2 * plan.slots)
        write_plan_report(options["report"], content, lines, curves)
        click.echo(f"report: {options['report']}", err=options["as_json"])
    if missed:
        if options["out"] is not None:
            click.echo(f"{options['out']} was not written: the plan misses its check", err=True)
        raise SystemExit(1)


def _write_yaml(options: dict[str, Any], plan: Any, model_dir: str | None) -> None:
    from moe_lora.report.results import write_text

    from .provision_result import PLACEHOLDER_DIR, plan_yaml

    asked = {name: options[name] for name in QUANTISATION if options[name] not in (None, False, "checkpoint")}
    write_text(options["out"], plan_yaml(plan, model_dir, engine=asked))
    fill = "" if model_dir else f" (put the checkpoint's folder in place of {PLACEHOLDER_DIR})"
    click.echo(f"cluster file: {options['out']}{fill}", err=options["as_json"])
