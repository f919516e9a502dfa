# SPDX-License-Identifier: Apache-2.0
"""Metric families of engine and controllers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from moe_lora.config import EngineConfig
from moe_lora.core.records import ServerState
from moe_lora.core.request import (
    PAUSE_BUCKETS_S,
    STEP_BUCKETS,
    AdapterInfo,
    AdapterResidency,
    EngineStats,
    FleetStats,
    ModelInfo,
    MoveStats,
    RoutingStats,
)

if TYPE_CHECKING:
    from moe_lora.dist.cluster.controller.cluster_state import Figures
    from moe_lora.dist.cluster.controller.controller_link import ControllerLink

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

GAUGES = (
    ("vllm:num_requests_running", "Requests being computed.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait for room or for their adapter.", "num_waiting"),
    ("moe_lora:num_requests_background", "Requests of batches in a queue.", "num_background"),
    ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", "kv_usage"),
    (
        "moe_lora:merge_kept_bytes",
        "Original weights that are kept on the host because an adapter was merged, of one process.",
        "merge_kept_bytes",
    ),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:num_preemptions", "Times a running request gave its KV pages back.", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("moe_lora:merges", "Times an adapter was merged into the weights.", "merges"),
    ("moe_lora:unmerges", "Times an adapter was taken out of the weights.", "unmerges"),
    ("moe_lora:adapter_loads", "Adapters brought to the device.", "adapter_loads"),
    ("moe_lora:adapters_preloaded", "Of these, before anybody asked for them.", "adapters_preloaded"),
    ("moe_lora:adapter_evictions", "Adapters that had to leave the device.", "adapter_evictions"),
    ("moe_lora:adapter_load_bytes", "Bytes of adapters read from their files.", "adapter_load_bytes"),
    ("moe_lora:adapter_hits", "Requests that found their adapter on the device.", "adapter_hits"),
    ("moe_lora:adapter_misses", "Requests that waited for their adapter to come.", "adapter_misses"),
    ("moe_lora:requests_put_back", "Times a loading request gave its room to an older one.", "num_put_back"),
    ("moe_lora:kv_lost_bytes", "Bytes of history that left the device unsaved.", "kv_lost_bytes"),
    ("moe_lora:kv_query_tokens", "Prompt tokens looked up in the history.", "kv_query_tokens"),
    ("moe_lora:lora_server_requests", "Messages answered by the LoRA Server.", "lora_server_requests"),
    (
        "moe_lora:lora_server_fallback_rows",
        "Rows of deltas that the engine computed because the LoRA Server did not.",
        "lora_server_fallback_rows",
    ),
    (
        "moe_lora:lora_server_host_rows",
        "Rows of deltas that host workers of the LoRA Server computed.",
        "lora_server_host_rows",
    ),
    (
        "moe_lora:lora_server_put_steps",
        "Steps whose rows the device put to the LoRA Server itself.",
        "lora_server_put_steps",
    ),
    (
        "moe_lora:lora_server_redone_steps",
        "Of these, steps computed again because answers were missing.",
        "lora_server_redone_steps",
    ),
    (
        "moe_lora:host_fallback_rows",
        "Rows of deltas that the engine computed because a host worker did not.",
        "host_fallback_rows",
    ),
    ("moe_lora:pool_fetched_bytes", "Bytes of adapters read from other instances.", "pool_fetched_bytes"),
    (
        "moe_lora:pool_failed_sources",
        "Instances and directories that did not give an adapter as they should.",
        "pool_failed_sources",
    ),
)
LABELLED: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "moe_lora:kv_hit_tokens",
        "Prompt tokens found in the history, by where they were.",
        "tier",
        (("device", "kv_device_hit_tokens"), ("host", "kv_host_hit_tokens")),
    ),
    (
        "moe_lora:swapped_bytes",
        "Bytes copied between the arenas, towards the device (in) and away from it (out).",
        "direction",
        (("in", "swapped_in_bytes"), ("out", "swapped_out_bytes")),
    ),
    (
        "moe_lora:lora_rows",
        "Rows x layers whose deltas were computed on the device, by the LoRA Server, by host workers.",
        "where",
        (("local", "lora_rows_local"), ("leased", "lora_rows_leased"), ("host", "lora_rows_host")),
    ),
    (
        "moe_lora:engine_steps",
        "Steps of the engine: on the base's weights, on an adapter's for its own requests, for others' too.",
        "mode",
        (("unmerged", "steps_unmerged"), ("merged", "steps_merged"), ("mixed", "steps_mixed")),
    ),
    (
        "moe_lora:merge_seconds",
        "Seconds in which an adapter was merged into the weights, and taken out.",
        "direction",
        (("in", "merge_s"), ("out", "unmerge_s")),
    ),
    (
        "moe_lora:pool_fetches",
        "Adapters fetched that the instance did not hold, by where they came from.",
        "source",
        (("peer", "pool_peer_fetches"), ("disk", "pool_disk_fetches")),
    ),
)
"""Labelled counters: the label's values and fields."""
STEPS = ("vllm:iteration_tokens_total", "Prompt tokens computed and tokens generated in a step.")
ARENA_LABELS = ("model_name", "tier")
TIERS = ("device", "host")
INSTANCE_GAUGES = (
    ("moe_lora:instance_up", "1 while the instance answers.", "live"),
    ("moe_lora:instance_silent", "1 while it gets no requests because it does not get on.", "silent"),
    ("moe_lora:instance_drained", "1 while it is drained: others get its requests.", "drained"),
    ("moe_lora:instance_requests_running", "Requests being computed.", "num_running"),
    ("moe_lora:instance_requests_waiting", "Requests that wait in the instance.", "num_waiting"),
    ("moe_lora:instance_kv_cache_usage", "Share of KV pages in use, 0 to 1.", "kv_usage"),
    ("moe_lora:instance_outstanding_tokens", "Tokens its requests may still need.", "outstanding_tokens"),
    ("moe_lora:instance_pool_adapters", "Adapters it holds for the pool.", "pool_adapters"),
    ("moe_lora:instance_pool_bytes", "Host memory that these take.", "pool_bytes"),
)
INSTANCE_COUNTERS = (
    ("moe_lora:instance_restarts", "Times it was started again.", "num_restarts"),
    ("moe_lora:instance_requests_resent", "Requests it left to another instance.", "num_resent"),
)
OUTLOOK_GAUGES = (
    (
        "moe_lora:iar_predicted",
        "Share of requests that start at once, by the corrected model.",
        "predicted_iar",
    ),
    ("moe_lora:iar_predicted_paper", "The same by InfiniLoRA's equation 4.", "predicted_iar_paper"),
    ("moe_lora:iar_measured", "Share of requests that started at once.", "measured_iar"),
    ("moe_lora:iar_target", "Share of requests that should start at once.", "target_iar"),
    ("moe_lora:adapter_capacity", "Adapters that fit at once.", "capacity"),
    ("moe_lora:adapter_capacity_needed", "The least capacity that meets the target.", "needed_capacity"),
    ("moe_lora:expected_active_adapters", "Adapters in use, mean by the model.", "expected_active"),
    ("moe_lora:global_batch", "Requests with an adapter in service, mean.", "global_batch"),
)
SERVER_GAUGES = (
    ("moe_lora:lora_server_capacity", "Adapters resident at once.", "capacity"),
    ("moe_lora:lora_server_resident_adapters", "Adapters resident.", "num_resident"),
    ("moe_lora:lora_server_leases", "Leases held by instances.", "num_leases"),
    ("moe_lora:lora_server_waiting", "Leases that instances wait for.", "num_waiting"),
    ("moe_lora:lora_server_resident_bytes", "Bytes of resident adapters.", "resident_bytes"),
    ("moe_lora:lora_server_ranks_away", "Ranks that are not there.", "num_away"),
    ("moe_lora:lora_server_unlinked", "Links missing between instances and ranks.", "num_unlinked"),
)
SERVER_COUNTERS = (
    ("moe_lora:lora_server_loads", "Adapters loaded.", "num_loads"),
    ("moe_lora:lora_server_evictions", "Adapters that had to leave.", "num_evictions"),
    ("moe_lora:lora_server_loaded_bytes", "Bytes of adapters loaded.", "loaded_bytes"),
)


RANK_AWARE_GAUGES = (
    (
        "moe_lora:rank_aware_infinite_share",
        "Share of rank_aware's choices in which no instance keeps slo_tpot_s, 0 to 1.",
        "infinite_share",
    ),
    (
        "moe_lora:rank_aware_mean_output_tokens",
        "Tokens of an answer that rank_aware expects.",
        "mean_output_tokens",
    ),
)
PLACEMENT_COUNTERS = (
    ("moe_lora:placement_tables", "Routing tables so far.", "num_tables"),
    ("moe_lora:placement_moves", "Adapters moved to an instance.", "num_copies"),
    ("moe_lora:placement_problems", "Placements that could not be made.", "num_problems"),
)


def family(
    kind: Kind,
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Mapping[Any, float | None],
) -> Metric:
    """A family with samples by label values, without None."""
    found = kind(name, text, labels=labels)
    for values, value in samples.items():
        if value is not None:
            found.add_metric(values, value)
    return found


def plain(kind: Kind, name: str, text: str, model_name: str, value: float | None) -> Metric:
    """A family of one sample, labelled by the model."""
    return family(kind, name, text, ("model_name",), {(model_name,): value})


def table(
    kind: Kind, rows: tuple[tuple[str, str, str], ...], model_name: str, state: Any
) -> Iterator[Metric]:
    """A plain family for each row: name, text, field of `state`, if present."""
    for name, text, field in rows:
        yield plain(kind, name, text, model_name, getattr(state, field, None))


def engine_families(model_name: str, stats: EngineStats | None, max_loras: int) -> Iterator[Metric]:
    """Families of the engine's last stats; None: the engine is gone."""
    up = stats is not None
    yield plain(GaugeMetricFamily, "moe_lora:engine_up", "1 while the engine answers.", model_name, up)
    if stats is None:
        return
    yield from table(GaugeMetricFamily, GAUGES, model_name, stats)
    yield from table(CounterMetricFamily, COUNTERS, model_name, stats)
    yield waiting_family(model_name, stats)
    yield histogram(*STEPS, model_name, STEP_BUCKETS, stats.step_counts, stats.step_tokens)
    for name, text, label, fields in LABELLED:
        counts = {(model_name, value): getattr(stats, field) for value, field in fields}
        yield family(CounterMetricFamily, name, text, ("model_name", label), counts)
    yield family(
        GaugeMetricFamily,
        "moe_lora:arena_bytes",
        "Size of each arena.",
        ARENA_LABELS,
        {(model_name, tier): getattr(stats, f"{tier}_bytes") for tier in TIERS},
    )
    yield family(
        GaugeMetricFamily,
        "moe_lora:arena_used_bytes",
        "Of these, those in use, by what they hold.",
        (*ARENA_LABELS, "kind"),
        {
            (model_name, tier, kind): getattr(stats, f"{tier}_{kind}_bytes")
            for tier in TIERS
            for kind in ("kv", "adapter")
        },
    )
    yield plain(
        GaugeMetricFamily,
        "moe_lora:kv_invalid_share",
        "Share of the device's KV whose adapter is not on the device, 0 to 1.",
        model_name,
        stats.device_kv_invalid_bytes / max(1, stats.device_kv_bytes),
    )
    # For routers: "running" is every adapter ready on the device, in use or idle.
    running, waiting = ",".join(stats.resident_adapters), ",".join(stats.waiting_adapters)
    yield family(
        GaugeMetricFamily,
        "vllm:lora_requests_info",
        "Adapters on the device, and adapters of requests that wait; the value is the time.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        {(str(max_loras), running, waiting): time.time()},
    )
    resident = {(name,): 1.0 for name in stats.resident_adapters}
    text = "1 for each adapter on the device."
    yield family(GaugeMetricFamily, "moe_lora:adapter_resident", text, ("adapter",), resident)
    # A sample of each of several instances.
    instances = stats.instances if isinstance(stats, FleetStats) else ()
    kinds = {GaugeMetricFamily: INSTANCE_GAUGES, CounterMetricFamily: INSTANCE_COUNTERS}
    for kind, rows in kinds.items():
        for name, text, field in rows:
            found = {(model_name, one.name): getattr(one, field) for one in instances}
            yield family(kind, name, text, ("model_name", "instance"), found)
    yield from move_families(model_name, stats.moves if isinstance(stats, FleetStats) else None)
    if isinstance(stats, FleetStats) and stats.routing is not None:
        yield from routing_families(model_name, stats.routing)


def waiting_family(model_name: str, stats: EngineStats) -> Metric:
    """Waiting requests by vLLM's reasons."""
    deferred = {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}
    return family(
        GaugeMetricFamily,
        "vllm:num_requests_waiting_by_reason",
        "Of the waiting requests: for room (capacity); for their adapter or the end of a pause (deferred).",
        ("model_name", "reason"),
        {(model_name, reason): num for reason, num in deferred.items()},
    )


def cache_config_family(model_name: str, config: EngineConfig, info: ModelInfo | None) -> Metric:
    """The cache of an instance, in labels."""
    labels = {"model_name": model_name}
    if info is not None:
        share, num_tokens = config.memory_utilization, info.block_size * info.num_kv_blocks
        labels |= {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks),
            "kv_cache_size_tokens": str(num_tokens),
            "kv_cache_max_concurrency": f"{num_tokens / info.max_model_len:.2f}",
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(config.prefix_caching),
            "gpu_memory_utilization": "None" if share is None else f"{share:g}",
        }
    return family(
        GaugeMetricFamily,
        "vllm:cache_config_info",
        "1; the cache of one instance, in labels.",
        tuple(labels),
        {} if info is None else {tuple(labels.values()): 1},
    )


LEVELS: tuple[AdapterResidency, ...] = ("device", "remote", "host", "peer", "disk", "unavailable")
"""Best first."""


def loaded_family(adapters: Sequence[AdapterInfo], limit: int) -> Metric:
    """1 for each adapter and level: at most `limit`, or all adapters on the device."""
    ordered = sorted(adapters, key=lambda one: LEVELS.index(one.residency))
    num_ready = sum(one.residency in ("device", "remote") for one in ordered)
    return family(
        GaugeMetricFamily,
        "vllm:lora_adapter_loaded",
        "1 for each adapter, by the place of its bytes.",
        ("adapter_name", "level", "pinned", "rank"),
        {
            (one.name, one.residency, str(one.pinned).lower(), str(one.lora_rank)): 1
            for one in ordered[: max(num_ready, limit)]
        },
    )


def routing_families(model_name: str, routing: RoutingStats) -> Iterator[Metric]:
    yield family(
        CounterMetricFamily,
        "moe_lora:rank_aware_choices",
        "Instances chosen by rank_aware; infinite: no instance keeps slo_tpot_s.",
        ("model_name", "cost"),
        {(model_name, cost): num for cost, num in routing.num_choices.items()},
    )
    yield from table(GaugeMetricFamily, RANK_AWARE_GAUGES, model_name, routing)


def move_families(model_name: str, moves: MoveStats | None) -> Iterator[Metric]:
    """Families of moved requests; None: a single engine."""
    yield family(
        CounterMetricFamily,
        "moe_lora:migrations",
        "Requests moved to another instance, by how.",
        ("model_name", "kind"),
        {} if moves is None else {(model_name, kind): num for kind, num in moves.num_moved.items()},
    )
    text = "Moves after which the request went on where it was, or had ended."
    yield plain(
        CounterMetricFamily,
        "moe_lora:migrations_failed",
        text,
        model_name,
        getattr(moves, "num_failed", None),
    )
    text = "From the source's hold to the target's first token."
    counts, total_s = (None, 0.0) if moves is None else (moves.pause_counts, moves.pause_s)
    name = "moe_lora:migration_pause_seconds"
    yield histogram(name, text, model_name, PAUSE_BUCKETS_S, counts, total_s)


def histogram(
    name: str,
    text: str,
    model_name: str,
    bounds: Sequence[float],
    counts: Sequence[int] | None,
    total: float,
) -> Metric:
    """A histogram of counted values."""
    found = HistogramMetricFamily(name, text, labels=["model_name"])
    if counts is not None:
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        found.add_metric([model_name], list(zip(names, accumulate(counts), strict=True)), total)
    return found


def server_families(model_name: str, server: ServerState | None) -> Iterator[Metric]:
    """Families of the LoRA Server; None: no answer."""
    text = "1 while its leader answers."
    yield plain(GaugeMetricFamily, "moe_lora:lora_server_up", text, model_name, server is not None)
    yield from table(GaugeMetricFamily, SERVER_GAUGES, model_name, server)
    yield from table(CounterMetricFamily, SERVER_COUNTERS, model_name, server)


def placement_families(model_name: str, figures: Figures, has_points: bool) -> Iterator[Metric]:
    """Families of the placement.  has_points: loads are shares."""
    yield from table(CounterMetricFamily, PLACEMENT_COUNTERS, model_name, figures)
    quality = figures.quality
    yield plain(
        GaugeMetricFamily,
        "moe_lora:placement_max_utilisation",
        "Forecast load of the busiest instance, 1 = its operating point.",
        model_name,
        quality.worst_load if quality is not None and has_points else None,
    )
    yield plain(
        GaugeMetricFamily,
        "moe_lora:placement_adapters_held",
        "Adapters of the fullest instance.",
        model_name,
        None if quality is None else quality.most_held,
    )


def link_families(model_name: str, link: ControllerLink) -> Iterator[Metric]:
    """Families of a front end's link."""
    yield family(
        GaugeMetricFamily,
        "moe_lora:front_end",
        "1; which of several front ends behind one port these metrics are of.",
        ("model_name", "front_end"),
        {(model_name, link.name): 1},
    )
    if link.epoch:
        yield family(
            GaugeMetricFamily,
            "moe_lora:controller_epoch",
            "Epoch of the latest leading one of several controllers.",
            ("model_name", "controller"),
            {(model_name, link.leader): link.epoch},
        )
    number = 0 if link.state is None else link.state.number
    for kind, name, text, value in (
        (GaugeMetricFamily, "moe_lora:controller_up", "1 while the controller is there.", link.up),
        (
            GaugeMetricFamily,
            "moe_lora:controller_state",
            "Number of the state that this front end routes by.",
            number,
        ),
        (
            CounterMetricFamily,
            "moe_lora:controller_joins",
            "Connections to the controller so far.",
            link.num_joins,
        ),
    ):
        yield plain(kind, name, text, model_name, value)
