# SPDX-License-Identifier: Apache-2.0
"""`moe-lora replay`."""

from __future__ import annotations

from typing import Any

import click

from moe_lora.config.plan import ARRIVALS, ReplayOptions, WorkloadOptions

from .errors import user_errors
from .options import FORMAT, POPULARITY, ZIPF, VariadicCommand, read_files, setting_options

_FILE = click.Path(exists=True, dir_okay=False)
_OUT = click.Path(dir_okay=False)

_WHERE = (
    click.option("--model", help="Base model's name.  [default: the first base model the server lists]"),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token."),
)
_LOAD = (
    click.option("--trace", required=True, type=_FILE, help="Trace file."),
    FORMAT,
    click.option(
        "--arrivals",
        type=click.Choice(ARRIVALS),
        help="trace: the trace's times, scaled to --request-rate; gamma: drawn at --request-rate.  "
        "[default: gamma with --request-rate, else trace]",
    ),
    click.option("--request-rate", type=float, help="Requests per second."),
)
_ADAPTERS = (
    click.option("--lora-modules", multiple=True, metavar="NAMES...", help="Adapters to request."),
    click.option("--num-adapters", type=int, help="Request the first N adapters of the server's list."),
    ZIPF,
    POPULARITY,
    click.option("--adapter-counts", type=_FILE, help="Popularity by counts: CSV adapter,count or JSON."),
    click.option("--functions", type=_FILE, help="Arrivals and adapters from an Azure Functions trace."),
    click.option(
        "--skewness",
        type=int,
        help="Map functions, or names in the trace, to adapters in round-robin blocks of this size.  "
        "[default with --functions: 1]",
    ),
)
_PROMPTS = (
    click.option("--prompts", type=_FILE, help='JSON lines {"adapter", "prompt"[, "answer"]} to send.'),
    click.option("--random-prompts", is_flag=True, help="Random token ids even if the trace has texts."),
)
_RESULT = (
    click.option("--slo-ttft-s", default=0.25),
    click.option("--slo-tpot-s", default=0.1),
    click.option("--label", help="Name of the run in tables and plots.  [default: the model]"),
    click.option("--emulates", metavar="DEVICE", help="Device that the server emulates; marks the results."),
    click.option("--quiet", is_flag=True, help="Print no table and no file names."),
    click.option("--save-result", type=_OUT, help="Write the run as JSON."),
    click.option("--append-result", type=_OUT, help="Append a JSON line {kind, config, result, env}."),
    click.option("--report", "report_path", type=_OUT, help="Write an HTML page with plots."),
)


def _options(function: Any) -> Any:
    for option in reversed(_WHERE + _LOAD + _ADAPTERS + _PROMPTS + _RESULT):
        function = option(function)
    return function


@setting_options(ReplayOptions)
@setting_options(WorkloadOptions)
@click.command(cls=VariadicCommand, variadic=["--lora-modules"])
@_options
@user_errors
def replay(**options: Any) -> None:
    """Send a trace's traffic to an OpenAI-compatible server and measure it.

    Requests are sent at their arrival times, whether earlier ones are done or not. Without --lora-modules,
    --num-adapters and --adapter-counts they ask for the adapters the trace names, else the base model.
    Ctrl-C stops and keeps what there is.
    """
    from moe_lora.report.results import check_targets

    from . import replay_run

    check_targets(
        read_files(options),
        save_result=options["save_result"],
        append_result=options["append_result"],
        report=options["report_path"],
    )
    run, interrupted = replay_run.measure(options)
    unwritten = replay_run.save(run, options)
    replay_run.show(run, quiet=options["quiet"])
    if unwritten:
        raise click.ClickException("; ".join(unwritten))
    if interrupted:
        click.echo("interrupted; the results cover what was done until then", err=True)
        raise click.exceptions.Exit(130)
    if not run["completed"]:
        raise click.ClickException("no request was completed")
