"""The steps of `moe-lora replay`: ask the server, plan, send, show, save."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from moe_lora.report import SloTargets, append_result, environment, write_json
from moe_lora.report.client import ServedModels
from moe_lora.report.exchange import ReplayOptions
from moe_lora.report.replay import replay, served_models
from moe_lora.report.run_file import run_result, without_arrays
from moe_lora.report.tables import summary_table
from moe_lora.workload import (
    PlannedRequest,
    Popularity,
    Trace,
    WorkloadOptions,
    make_plan,
    read_counts,
    read_trace,
    zipf,
)
from moe_lora.workload.prompts import read_prompts

from .progress import progress

_NOT_SAVED = ("api_key", "save_result", "append_result", "report_path", "label")
_MOST_NAMES_SHOWN = 20


def measure(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The run as a file holds it, and whether the user stopped it."""
    slo = SloTargets(ttft_s=options["slo_ttft_s"], tpot_s=options["slo_tpot_s"])
    trace = read_trace(options["trace"], options["format"])
    for reason, count in trace.dropped.items():
        click.echo(f"{trace.path}: {count} rows left out: {reason}", err=True)
    workload = workload_options(options, trace)
    served = served_models(options["url"], options["api_key"])
    plan = make_plan(
        trace,
        workload,
        adapter_popularity(options, served),
        read_prompts(options["prompts"]) if options["prompts"] else None,
    )
    check_served({request.adapter for request in plan}, served, options["url"])
    sending = replay_options(options, served)
    click.echo(
        f"{len(plan)} requests over {plan[-1].arrival_s:.0f} s to {options['url']}, "
        f"{len({r.adapter for r in plan} - {None})} adapters, trace {trace.path} ({trace.format})",
        err=True,
    )
    with progress() as on_progress:
        outcome = replay(plan, sending, on_progress)
    run = run_result(
        outcome.records,
        outcome.duration_s,
        slo,
        label=options["label"] or sending.model,
        config=saved_config(options, sending, trace, plan),
        env=environment(),
        stopped_early=outcome.interrupted,
    )
    return run, outcome.interrupted


def workload_options(options: dict[str, Any], trace: Trace) -> WorkloadOptions:
    """Defaults resolved: drawn arrivals if a rate is given, the trace's texts if it has any."""
    if options["prompts"] and options["random_prompts"]:
        raise ValueError("--prompts and --random-prompts exclude each other; give one of them")
    drawn = options["arrivals"] or ("gamma" if options["request_rate"] is not None else "trace")
    has_texts = all(request.prompt is not None for request in trace.requests)
    return WorkloadOptions(
        arrivals=drawn,
        request_rate_per_s=options["request_rate"],
        burstiness=options["burstiness"],
        duration_s=options["duration_s"],
        busiest=options["busiest"],
        num_requests=options["num_requests"],
        max_prompt_tokens=options["max_prompt_tokens"],
        max_output_tokens=options["max_output_tokens"],
        prompts="text" if has_texts and not (options["random_prompts"] or options["prompts"]) else "random",
        seed=options["seed"],
    )


def adapter_popularity(options: dict[str, Any], served: ServedModels) -> Popularity | None:
    """From --lora-modules, --num-adapters or --adapter-counts; None without any of them."""
    given = [name for name in ("lora_modules", "num_adapters", "adapter_counts") if options[name]]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{names} exclude each other; give one of them")
    if options["adapter_counts"]:
        return read_counts(options["adapter_counts"])
    if options["lora_modules"]:
        return zipf(options["lora_modules"], options["zipf"])
    wanted = options["num_adapters"]
    if wanted is None:
        return None
    if not 1 <= wanted <= len(served.adapters):
        raise ValueError(
            f"--num-adapters {wanted}: the server lists {len(served.adapters)} adapters; "
            f"choose 1 to {len(served.adapters)}, or load more into the server"
        )
    return zipf(served.adapters[:wanted], options["zipf"])


def check_served(adapters: set[str | None], served: ServedModels, url: str) -> None:
    """Raises ValueError if an adapter is not among the server's models."""
    known = (*served.adapters, *served.base)
    missing = sorted(name for name in adapters if name is not None and name not in known)
    if missing:
        raise ValueError(f"{url} does not serve {_some(missing)}; it serves {_some(known) or 'nothing'}")


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def replay_options(options: dict[str, Any], served: ServedModels) -> ReplayOptions:
    """Raises ValueError if no base model is named, by the user or by the server."""
    model = options["model"] or next(iter(served.base), None)
    if model is None:
        raise ValueError(f"{options['url']} lists no base model; give --model")
    check_served({model}, served, options["url"])
    names = ("url", "timeout_s", "max_connections", "temperature", "force_length", "vocab_size", "seed")
    return ReplayOptions(model=model, api_key=options["api_key"], **{name: options[name] for name in names})


def saved_config(
    options: dict[str, Any], sending: ReplayOptions, trace: Trace, plan: list[PlannedRequest]
) -> dict[str, Any]:
    """The options as given, and what became of those that were left to be resolved."""
    kept = {name: value for name, value in options.items() if name not in _NOT_SAVED}
    return {**kept, "model": sending.model, "format": trace.format, "num_prompts": len(plan)}


def show(run: dict[str, Any]) -> None:
    """The table on stdout; what failed, and whether the client kept up, on stderr."""
    Console().print(summary_table([run]))
    for message, count in run["error_counts"].items():
        click.echo(f"{count} requests failed: {message}", err=True)
    delay_ms = run["p99_send_delay_ms"]
    if delay_ms is not None and delay_ms > 50:
        click.echo(f"requests left up to {delay_ms:.0f} ms late (P99): this machine is too busy", err=True)


def save(run: dict[str, Any], options: dict[str, Any]) -> None:
    """Write the files asked for."""
    if options["save_result"]:
        write_json(options["save_result"], run)
    if options["append_result"]:
        append_result(
            options["append_result"],
            config=run["config"],
            result=without_arrays(run),
            env=run["env"],
            kind=run["kind"],
        )
    if options["report_path"]:
        from moe_lora.report.html import write_report

        write_report(options["report_path"], [run], f"Load test of {run['label']}")
    for name in ("save_result", "append_result", "report_path"):
        if options[name]:
            click.echo(f"wrote {options[name]}", err=True)
