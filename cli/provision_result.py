# SPDX-License-Identifier: Apache-2.0
"""A plan as text and cluster file, and the check of --verify.

The second simulator's latencies decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
import yaml

from moe_lora.config.devices import instance_names
from moe_lora.core.errors import CapacityError
from moe_lora.core.progress import progress
from moe_lora.provision.plan.checked import place_of, planned_rate, searched_requests
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.inputs import PlanInputs, SizedCluster
from moe_lora.provision.plan.memory import bytes_text
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import (
    ARRIVALS,
    OTHER_DRAWS,
    TARGETS,
    Replay,
    Verdict,
    holds,
    missed_texts,
    planned_load,
    replays,
    verdicts,
)
from moe_lora.workload.traces.traces import PARTS

if TYPE_CHECKING:
    from moe_lora.provision.plan.two_simulators import Latencies
    from moe_lora.workload.traces.records import Trace

SEED = 1
"""Seed of arrivals and adapters; plans are chosen with `checked.SEEDS`."""
_SHOWN_EVERY = 50
"""Requests."""
_COLUMNS = (
    *("at once", "waited for a slot", "waited for KV or batch"),
    *("P95 TTFT", "P95 decode TTFT", "TPOT", "loads/s"),
)


def verified(inputs: PlanInputs, plan: Plan, trace: Trace) -> tuple[dict[str, Any], list[str], str]:
    """Replays and verdicts as JSON and lines; the missed targets, or ""."""
    place, rate_per_s = place_of(plan), planned_rate(inputs, plan)
    load = planned_load(inputs, rate_per_s, trace, seed=SEED)
    try:
        found = replays(Cluster(inputs), place, load)
    except KeyboardInterrupt:
        return {"held": None}, [], "This plan was not checked: Ctrl-C stopped the check"
    judged = verdicts(inputs, found, OTHER_DRAWS)
    held = holds(inputs, found, OTHER_DRAWS)
    content = {
        "verified": [asdict(one) for one in found],
        "verdicts": [asdict(verdict) for verdict in judged],
        "held": held,
    }
    tolerance = f"within {100 * OTHER_DRAWS.share:.0f} points and {OTHER_DRAWS.time:.0%}"
    lines = [*_replay_lines(found), "", f"Targets ({tolerance}):", *_verdict_lines(judged)]
    if not held:
        return content, lines, _missed(judged)
    simulators, shown = _both_simulators(inputs, place, rate_per_s, trace)
    return content | {"simulators": simulators}, [*lines, "", *shown], ""


def _both_simulators(
    inputs: PlanInputs, place: SizedCluster, rate_per_s: float, trace: Trace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Both simulators' latencies as JSON and lines, or the reason."""
    from moe_lora.provision.plan.two_simulators import FAST, NOT_REPLAYED, REAL, both, num_replayed

    number = num_replayed(inputs)
    try:
        with progress(lambda line: click.echo(line, err=True)) as write:

            def show(done: int, total: int) -> None:
                if done % _SHOWN_EVERY == 0:
                    write(f"{REAL}: {done}/{total} requests", done, total)

            found = both(inputs, place, rate_per_s, trace, num_requests=number, seed=SEED, show=show)
    except KeyboardInterrupt:
        return [], [f"{REAL}: Ctrl-C stopped the replay of {number} requests"]
    except CapacityError as error:
        return [], [f"{REAL} can't replay this plan: {error}"]
    heading = f"{FAST} and {REAL}, {ARRIVALS['poisson']} ({number} requests):"
    lines = [heading, *_latency_lines(found), f"{REAL} does not replay {NOT_REPLAYED}."]
    if inputs.prompts is not None and inputs.prompts.stated:
        share = f"{inputs.prompts.hit_share:.1%}"
        lines.append(f"In {REAL} the stated {share} are one prefix an adapter, and its first prompt misses.")
    return [asdict(one) for one in found], lines


def _latency_lines(found: Sequence[Latencies]) -> list[str]:
    columns = "P50 TTFT", "P95 TTFT", "P99 TTFT", "mean TPOT", "P95 TPOT", "within SLOs", "prefix hits"
    lines = [f"{'simulator':<20}" + "".join(name.rjust(13) for name in columns)]
    for one in found:
        ttft = (_seconds(value, ".3f") for value in (one.p50_ttft_s, one.p95_ttft_s, one.p99_ttft_s))
        tpot = (_seconds(value, ".4f") for value in (one.mean_tpot_s, one.p95_tpot_s))
        cells = (*ttft, *tpot, _shown(one.in_slo, ".2%"), _shown(one.prefix_hits, ".1%"))
        lines.append(f"{one.simulator:<20}" + "".join(cell.rjust(13) for cell in cells))
    return lines


def _replay_lines(found: Sequence[Replay]) -> list[str]:
    """A table for each kind of arrivals."""
    lines = []
    for one in found:
        row = (
            _shown(one.admitted_at_once, ".2%"),
            _shown(one.waited_for_adapter, ".2%"),
            _shown(one.waited_for_room, ".2%"),
            _seconds(one.p95_ttft_s, ".3f"),
            _seconds(one.p95_decode_ttft_s, ".3f"),
            _seconds(one.mean_tpot_s, ".4f"),
            _shown(one.loads_per_s, ".1f"),
        )
        heading = f"Checked by other draws, {ARRIVALS[one.arrivals]} ({one.num_requests} requests):"
        lines += ["", heading, _row(_COLUMNS), _row(row)]
    return lines


def _verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    """A line per target, and per missed kind of arrivals."""
    lines = []
    for target in TARGETS:
        kinds = [verdict for verdict in judged if verdict.target == target.goal]
        missed = missed_texts(kinds)
        known = sum(verdict.held is not None for verdict in kinds)
        outcome = f"{'missed' if missed else 'held'} in {len(missed) or known} of {known} kinds of arrivals"
        wanted = f"at {'least' if target.share else 'most'} {target.form.format(kinds[0].goal)}"
        name = target.name[0].upper() + target.name[1:]
        lines.append(f"{name}, {wanted}: {outcome if known else 'not judged, as no request shows it'}")
        lines += [f"  {text}" for text in missed]
    return lines


def _missed(judged: Sequence[Verdict]) -> str:
    return f"This plan does not hold its own check: {'; '.join(missed_texts(judged))}"


def _row(cells: Sequence[str]) -> str:
    widths = (max(10, len(name)) for name in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _seconds(value: float | None, form: str) -> str:
    return _shown(value, form) + " s"


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def replayed_share(plan: Plan, total: int, inputs: PlanInputs) -> Plan:
    """The plan, with its replayed part of the trace among the assumptions."""
    few, most = searched_requests(inputs)
    if total <= few:
        return plan
    part = f"the search replays {few} and {min(most, total)} of the trace's {total} requests, in {PARTS} runs"
    return replace(plan, assumptions=(*plan.assumptions, f"{part}; its means and longest request are of all"))


def plan_lines(plan: Plan) -> list[str]:
    """Deployment, reasons, expectations and assumptions."""
    lines = [f"{name:<18} {text}" for name, text in (*_deployed(plan), *_sized(plan), *_expected(plan))]
    return [*lines, "", "Assumed:", *(f"- {sentence}" for sentence in plan.assumptions)]


def _deployed(plan: Plan) -> Iterator[tuple[str, str]]:
    given, bound = plan.inputs, plan.lower_bound
    yield "GPUs in all", f"{plan.total_gpus} of {given['hardware']}: {deployment(plan)}"
    yield "Lower bound", "not known: the profile names no peak rates" if bound is None else bound.text
    if plan.compared:
        yield "Chosen", plan.compared
    yield "Numbers", given["hardware_about"] or "the profile does not say whose numbers these are"
    for name, value in given["assumed"].items():
        yield "", f"{name} = {value:g} as given with --assume, measured by nobody there"
    if plan.ran:
        yield "Ran there", ", ".join(plan.ran)
    yield "Never ran there", ", ".join(plan.never_ran) or "nothing of this plan"
    for number, one in enumerate(plan.checked):
        yield "" if number else "Simulated", _replay(one)
    source = given["popularity_source"] or "popularity as given"
    held = "" if given["weights"] == "none" else f" held as {given['weights']}"
    yield "Model", f"{given['model']}{held}, {given['num_adapters']} adapters ({source})"
    size = bytes_text(plan.bytes_per_adapter)
    prompts = given["prompts"]
    yield "Prompts", "computed by another device" if prompts is None else _prompts(plan, prompts)
    if plan.apart:
        yield "Prompts apart", plan.apart
    yield "Adapter", f"LoRA rank {ranks_text(plan)}: {size}, {given['adapter_form']} A for gate and up"


def _sized(plan: Plan) -> Iterator[tuple[str, str]]:
    target = plan.inputs["target_iar"]
    each = " on each instance" if plan.kind == "coupled" else ""
    using = f"using {plan.expected_active:.1f} adapters{each} (expected)"
    running = (
        "" if plan.inputs["prompts"] is None else f" decode, {plan.requests_in_service:.1f} with prompts"
    )
    at = f" at {plan.rate_per_s:.4g} requests/s" if plan.inputs["global_batch"] else ""
    yield "Requests at once", f"{plan.global_batch:.1f}{running}{at}, {using}"
    by_each = f"by the paper's model {plan.capacity_paper}, by the corrected one {plan.capacity_corrected}"
    yield "M*", f"{plan.capacity} adapters for {target:.1%} admitted at once ({by_each})"
    if plan.capacity < plan.expected_active and (plan.kind != "coupled" or plan.slots < plan.expected_active):
        waits = f"who has to wait, waits {plan.mean_wait_s:.2f} s for a slot on average"
        yield "", f"fewer than are active: {waits}; raise --target-iar where that is too long"
    yield "IAR at M*", _rates(plan.iar, plan.iar_corrected)
    if plan.kind == "coupled":
        each = f"{plan.slots} on each instance, {bytes_text(plan.slots * plan.bytes_per_adapter)}"
        yield "Adapters", f"{each} beside the weights; the rest is KV"
    else:
        held = f"{plan.layout}, holding {plan.slots} adapters"
        yield "LoRA Server", f"{_gpus(plan.lora_server_gpus)} as {held}"
    yield "IAR there", _rates(plan.slots_iar, plan.slots_iar_corrected)
    if plan.slots_iar_corrected < target:
        yield "", "below the target by the corrected model: --estimator corrected sizes by it"
    wait = f", a wait of {plan.load_wait_s * 1e3:.1f} ms before one begins" if plan.loads_per_s else ""
    yield "Loads", f"{plan.loads_per_s:.2f} adapters/s, {plan.loading_share:.0%} of the links' time{wait}"
    if plan.prefill_slots:
        yield "", f"{plan.prefill_loads_per_s:.2f} adapters/s to the instances for prompts"
    if plan.kind == "coupled":
        return
    needs = ", ".join(f"{name} alone: {gpus}" for name, gpus in plan.gpus_by_constraint.items())
    yield "Bound by", f"{plan.binding_constraint} ({needs or 'by the models none meets them all'})"


def _expected(plan: Plan) -> Iterator[tuple[str, str]]:
    given, ms = plan.inputs, plan.layer_ms
    each = f"{plan.batch_per_instance:.1f} requests each"
    prompts = f"; {plan.prefill_instances} for prompts" if plan.prefill_instances else ""
    decoding = plan.instances - plan.prefill_instances
    yield "Instances", f"{decoding} of {_gpus(plan.instance_gpus)}, {each}{prompts}"
    slo = f"SLO {given['slo_ttft_s']:g} s"
    if plan.p95_ttft_s is None:
        yield "P95 TTFT", f"not known: fewer than 95 % start at once, so the tail queues ({slo})"
    else:
        predicted = f"{plan.p95_ttft_s * 1e3:.1f} ms predicted, waits for loads included"
        if given["prompts"] is None:
            yield "P95 TTFT", f"{predicted}, without prefill ({slo})"
        else:
            yield "P95 TTFT", f"{predicted}, waits for other prompts not ({slo})"
            yield (
                "P95 decode TTFT",
                f"{(plan.p95_decode_ttft_s or 0.0) * 1e3:.1f} ms predicted, without the prompt",
            )
    at_load = f"{plan.tpot_at_load_s * 1e3:.2f} ms at the batch sized for"
    yield "TPOT", f"{plan.tpot_s * 1e3:.2f} ms, {at_load} (SLO {given['slo_tpot_s']:g} s)"
    base = f"attention {ms['attention']:.3f} ms, experts {ms['experts']:.3f} ms"
    if plan.kind == "coupled":
        yield "A layer", f"{base}, deltas {ms['deltas']:.3f} ms (SLO_Layer {ms['slo_layer']:.3f} ms)"
    else:
        served = f"receive {ms['receive']:.3f} + compute {ms['compute']:.3f} + send {ms['send']:.3f} ms"
        yield "A layer", f"{base} beside {served}"
        yield "Budgets", f"SLO_Layer {ms['slo_layer']:.3f} ms, SLO_FFN {ms['slo_ffn']:.3f} ms"
    if plan.serviceable_rate_per_s is not None:
        rate = f"{plan.serviceable_rate_per_s:.1f} requests/s"
        yield "Serviceable rate", f"{rate} ({plan.rate_limited_by} limits)"


def deployment(plan: Plan) -> str:
    """Roles on the GPUs."""
    each = _gpus(plan.instance_gpus)
    instances = f"1 instance of {each}" if plan.instances == 1 else f"{plan.instances} instances of {each}"
    if plan.prefill_instances:
        instances += f", {plan.prefill_instances} of them for prompts"
    if plan.kind == "coupled":
        return f"{instances}, with {plan.slots} adapters on each"
    if plan.prefill_instances:
        instances += f" with {plan.prefill_slots} adapters on each, the others"
    return f"{instances} beside a LoRA Server of {_gpus(plan.lora_server_gpus)} ({plan.layout})"


def ranks_text(plan: Plan) -> str:
    """The ranks, with shares if several."""
    ranks = plan.inputs["lora_ranks"]
    return ", ".join(f"{rank} ({share:.0%})" if len(ranks) > 1 else str(rank) for rank, share in ranks)


def _replay(one: Replay) -> str:
    at_once, ttft_s, tpot_s = one.admitted_at_once, one.p95_ttft_s, one.mean_tpot_s
    if at_once is None or ttft_s is None:
        return f"{ARRIVALS[one.arrivals]}: no request was judged"
    tpot = "" if tpot_s is None else f", TPOT {tpot_s * 1e3:.1f} ms"
    decode = "" if one.p95_decode_ttft_s is None else f" (decode {one.p95_decode_ttft_s * 1e3:.0f} ms)"
    return f"{ARRIVALS[one.arrivals]}: {at_once:.1%} at once, P95 TTFT {ttft_s * 1e3:.0f} ms{decode}{tpot}"


def _prompts(plan: Plan, prompts: Mapping[str, Any]) -> str:
    share, tokens = prompts["hit_share"], prompts["prompt_tokens"]
    source = "as stated" if prompts["stated"] else "by the trace's block hashes" if share else ""
    hits = f"{share:.1%} of it in computed prefixes, {source}" if source else "no prefix hits"
    time = f"{plan.prompt_share or 0.0:.0%} of an instance's time"
    return (
        f"{tokens:.0f} tokens on average, {hits}; {time}, steps of up to {plan.max_num_batched_tokens} rows"
    )


def _rates(paper: float, corrected: float) -> str:
    return f"{paper:.2%} by the paper's model, {corrected:.2%} by the corrected one"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _kv(plan: Plan) -> dict[str, Any]:
    """One size for both kinds beside a LoRA Server: prompt instances have adapters in it."""
    if plan.prefill_slots:
        return {"arena_mb": round(plan.kv_gb_per_rank * 1e3, 3), "max_loras": plan.prefill_slots}
    return {"kv_cache_gb": plan.kv_gb_per_rank}


PLACEHOLDER_DIR = "MODEL_DIR"


def plan_yaml(
    plan: Plan,
    model_dir: str | None,
    adapters: Sequence[tuple[str, str]] = (),
    engine: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """cluster.yaml of the plan, for `moe-lora serve --config`.  model_dir: None writes a placeholder."""
    tokens, lora_gb = plan.max_num_batched_tokens, round(plan.memory_gb_per_rank * 1.001 + 0.0005, 3)
    content: dict[str, Any] = {
        "model_dir": model_dir or PLACEHOLDER_DIR,
        **({"adapters": dict(adapters)} if adapters else {}),
        "engine": {
            "max_num_seqs": plan.max_num_seqs,
            **({"max_num_batched_tokens": tokens} if tokens else {}),
            **{name: number for name, number in plan.parallel.items() if number > 1},
            "num_instances": plan.instances,
            **_kv(plan),
            **({"max_model_len": plan.max_model_len} if plan.max_model_len else {}),
            **({"max_loras": plan.slots, "lora_memory_gb": lora_gb} if plan.kind == "coupled" else {}),
            **engine,
        },
    }
    if plan.kind != "coupled":
        content["lora_server"] = {
            "layout": plan.layout,
            "capacity": plan.slots,
            "memory_gb": plan.memory_gb_per_rank,
        }
    if plan.prefill_instances:
        content["front_end"] = {"prefill_instances": instance_names(plan.prefill_instances)}
    held = (
        f"each instance holds {plan.slots}"
        if plan.kind == "coupled"
        else (f"the server's GPUs hold {plan.slots}; bound by {plan.binding_constraint}")
    )
    bound = plan.lower_bound
    lines = [
        f"# {plan.total_gpus} GPUs of {plan.inputs['hardware']}: {deployment(plan)}",
        f"# Lower bound: {'not known' if bound is None else bound.text}",
        f"# Model: {plan.inputs['model']}.  Adapters: {plan.inputs['num_adapters']} of LoRA rank "
        f"{ranks_text(plan)}, {bytes_text(plan.bytes_per_adapter)} each; name their",
        "# folders under adapters (name: folder), or give --lora-dir, or load them over HTTP.",
        f"# M* = {plan.capacity} for an IAR of {plan.inputs['target_iar']:g}; {held}",
        "# For one host. Over several (docs/reference/cluster_file.md) add certificates,",
        "# lora_server.address, store_dir and transport, front_end.engines_address, and set",
        "# engine.num_instances to the instances of a host.",
    ]
    if model_dir is None:
        lines.append(f"# {PLACEHOLDER_DIR} is a placeholder: put the checkpoint's folder there.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)
