# SPDX-License-Identifier: Apache-2.0
"""The steps of `moe-lora replay`."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from moe_lora.config.plan import ReplayOptions, WorkloadOptions
from moe_lora.config.settings import settings_of
from moe_lora.core.progress import progress
from moe_lora.report import SloTargets, append_result, environment, write_json
from moe_lora.report.load_client import ServedModels
from moe_lora.report.replay import ReplayState, replay, served_models
from moe_lora.report.run_file import run_result, summary_table, without_arrays
from moe_lora.workload.popularity.functions import map_adapters, read_invocations, with_invocations
from moe_lora.workload.popularity.named import parse_popularity
from moe_lora.workload.popularity.popularity import Popularity, read_counts
from moe_lora.workload.replay_plan import PlannedRequest, make_plan, read_prompts
from moe_lora.workload.traces.records import Trace
from moe_lora.workload.traces.traces import read_trace

from .options import refuse_given

_NOT_SAVED = ("api_key", "save_result", "append_result", "report_path", "label", "quiet")
_SHAPES = ("zipf", "adapter_counts", "popularity")
_MOST_NAMES_SHOWN = 20


def adapter_popularity(options: dict[str, Any], served: ServedModels) -> Popularity | None:
    """The popularity by the options, or None."""
    _exclusive(options, "lora_modules", "num_adapters", "adapter_counts")
    _exclusive(options, *_SHAPES, "functions")
    if options["adapter_counts"]:
        return read_counts(options["adapter_counts"])
    text = popularity_text(options)
    return None if text is None else parse_popularity(text, _named(options, served))


def popularity_text(options: dict[str, Any]) -> str | None:
    """--popularity, or --zipf in its form, or None."""
    if options["functions"] or options["adapter_counts"]:
        return None
    if options["zipf"] is not None:
        return f"zipf:{options['zipf']}"
    names = options["lora_modules"] or options["num_adapters"] is not None
    return options["popularity"] or ("zipf" if names else None)


def with_identities(options: dict[str, Any], trace: Trace, served: ServedModels) -> Trace:
    """The trace with --functions, or with mapped names, else unchanged."""
    if options["functions"] is None and options["skewness"] is None:
        return trace
    names, skewness = _named(options, served), 1 if options["skewness"] is None else options["skewness"]
    if not names:
        raise ValueError("no adapter to map to; give --lora-modules or --num-adapters")
    if options["functions"] is None:
        return map_adapters(trace, names, skewness)
    invocations = read_invocations(
        options["functions"],
        names,
        skewness,
        request_rate_per_s=None if options["arrivals"] == "gamma" else options["request_rate"],
        duration_s=None if options["busiest"] else options["duration_s"],
        seed=options["seed"],
    )
    return with_invocations(trace, invocations)


def check_served(adapters: set[str | None], served: ServedModels, url: str) -> None:
    """Raises ValueError for an adapter unknown to the server."""
    known = (*served.adapters, *served.base)
    missing = sorted(name for name in adapters if name is not None and name not in known)
    if missing:
        raise ValueError(f"{url} does not serve {_some(missing)}; it serves {_some(known) or 'nothing'}")


def _exclusive(options: dict[str, Any], *names: str) -> None:
    given = [name for name in names if options[name] not in (None, ())]
    if len(given) > 1:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{said} exclude each other; give one of them")


def _named(options: dict[str, Any], served: ServedModels) -> tuple[str, ...]:
    """--lora-modules, or the server's first --num-adapters."""
    wanted = options["num_adapters"]
    if wanted is None:
        return tuple(options["lora_modules"])
    if not 1 <= wanted <= len(served.adapters):
        raise ValueError(
            f"--num-adapters {wanted}: the server lists {len(served.adapters)} adapters; "
            f"choose 1 to {len(served.adapters)}, or load more into the server"
        )
    return tuple(served.adapters[:wanted])


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _MOST_NAMES_SHOWN
    return ", ".join(names[:_MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def measure(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The run as in a file, and True if interrupted."""
    slo = SloTargets(ttft_s=options["slo_ttft_s"], tpot_s=options["slo_tpot_s"])
    trace = read_trace(options["trace"], options["format"])
    for reason, count in trace.dropped.items():
        click.echo(f"{trace.path}: {count} rows left out: {reason}", err=True)
    served = served_models(options["url"], options["api_key"])
    read, trace = trace, with_identities(options, trace, served)
    if all(request.adapter for request in trace.requests):
        names = ("lora_modules", "num_adapters") if trace is read else ()
        way_out = "leave {} out, or map the names by --skewness"
        refuse_given((*_SHAPES, *names), f"each request of the trace names its adapter; {way_out}")
    workload = workload_options(options, trace)
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
    with progress() as show:
        outcome = replay(
            plan, sending, lambda state: show(described(state), state.done + state.failed, state.total)
        )
    run = run_result(
        outcome.records,
        outcome.duration_s,
        slo,
        label=options["label"] or sending.model,
        config=saved_config(options, sending, trace, plan),
        env=environment(),
        kind="measured" if options["emulates"] is None else "emulated",
        stopped_early=outcome.interrupted,
    )
    return run, outcome.interrupted


def described(state: ReplayState) -> str:
    """sent 12/300, running 4, done 8, failed 0, 212 tokens/s"""
    running = state.sent - state.done - state.failed
    rate = state.output_tokens / state.elapsed_s if state.elapsed_s else 0.0
    return (
        f"sent {state.sent}/{state.total}, running {running}, done {state.done}, "
        f"failed {state.failed}, {rate:.0f} tokens/s"
    )


def workload_options(options: dict[str, Any], trace: Trace) -> WorkloadOptions:
    """Resolved options: drawn arrivals with a rate, texts if present."""
    if options["prompts"] and options["random_prompts"]:
        raise ValueError("--prompts and --random-prompts exclude each other; give one of them")
    rate = options["request_rate"]
    drawn = options["arrivals"] or ("trace" if rate is None or options["functions"] else "gamma")
    if options["functions"] and drawn == "trace":
        rate = None  # invocations are thinned to the rate, not scaled
    has_texts = all(request.prompt is not None for request in trace.requests)
    same = (
        "burstiness",
        "duration_s",
        "busiest",
        "num_requests",
        "max_prompt_tokens",
        "max_output_tokens",
        "seed",
    )
    return WorkloadOptions(
        arrivals=drawn,
        request_rate_per_s=rate,
        prompts="text" if has_texts and not (options["random_prompts"] or options["prompts"]) else "random",
        **{name: options[name] for name in same},
    )


def replay_options(options: dict[str, Any], served: ServedModels) -> ReplayOptions:
    """The client's options.  Raises ValueError without a base model."""
    model = options["model"] or next(iter(served.base), None)
    if model is None:
        raise ValueError(f"{options['url']} lists no base model; give --model")
    check_served({model}, served, options["url"])
    return ReplayOptions(**{name: options[name] for name in settings_of(ReplayOptions)} | {"model": model})


def saved_config(
    options: dict[str, Any], sending: ReplayOptions, trace: Trace, plan: list[PlannedRequest]
) -> dict[str, Any]:
    """The options as given, and resolved values."""
    kept = {name: value for name, value in options.items() if name not in _NOT_SAVED}
    found = {"model": sending.model, "format": trace.format, "popularity": popularity_text(options)}
    return {**kept, **found, "num_prompts": len(plan)}


def show(run: dict[str, Any], *, quiet: bool = False) -> None:
    """Print the table unless quiet; failures on stderr."""
    if not quiet:
        Console().print(summary_table([run]))
    for message, count in run["error_counts"].items():
        click.echo(f"{count} requests failed: {message}", err=True)
    delay_ms = run["p99_send_delay_ms"]
    if delay_ms is not None and delay_ms > 50:
        click.echo(f"requests left up to {delay_ms:.0f} ms late (P99): this machine is too busy", err=True)


def save(run: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Write the files; the failures."""
    failures = []
    for name, write in (("save_result", write_json), ("append_result", _append), ("report_path", _report)):
        path = options[name]
        if not path:
            continue
        try:
            write(path, run)
        except Exception as error:
            failures.append(f"{path} was not written: {error}")
            continue
        if not options["quiet"]:
            click.echo(f"wrote {path}", err=True)
    return failures


def _append(path: str, run: dict[str, Any]) -> None:
    append_result(path, config=run["config"], result=without_arrays(run), env=run["env"], kind=run["kind"])


def _report(path: str, run: dict[str, Any]) -> None:
    from moe_lora.report.html import write_report

    write_report(path, [run], f"Load test of {run['label']}")
