"""Prometheus metrics: vLLM's names where they exist, our own under moe_lora: (docs/reference/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moe_lora.core.request import EngineStats, FleetStats, InstanceStats, RequestTiming
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.controller_views import PlacementView, ProvisionView, VisitView

from .collectors import LinkCollector, PlacementCollector, ProvisionCollector

# The stopwatch of one request, which feeds the metrics and the load on adapters.


class RequestWatch:
    """Stamps the tokens of one choice as they leave the engine."""

    __slots__ = ("_arrival_s", "_first_s", "_last_s", "_metrics", "_num_tokens", "_visit")

    def __init__(self, metrics: Metrics, visit: VisitView | None) -> None:
        self._metrics = metrics
        self._visit = visit
        self._arrival_s = time.perf_counter()
        self._first_s = self._last_s = self._arrival_s
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        """Tokens that came just now; of several at once each took an equal share of the time."""
        if not num_tokens:
            return
        now_s = time.perf_counter()
        if self._num_tokens == 0:
            self._first_s = now_s
            self._metrics.ttft.observe(now_s - self._arrival_s)
            if self._visit is not None:
                self._visit.start()
        else:
            gap_s = (now_s - self._last_s) / num_tokens
            for _ in range(num_tokens):
                for histogram in self._metrics.itl:
                    histogram.observe(gap_s)
        self._last_s = now_s
        self._num_tokens += num_tokens

    def refuse(self) -> None:
        """The engine never took the request."""
        if self._visit is not None:
            self._visit.refuse()

    def end(self, reason: str, timing: RequestTiming | None) -> None:
        if self._visit is not None:
            self._visit.end(timing)
        metrics = self._metrics
        metrics.count(reason)
        if reason in ("stop", "length"):
            metrics.e2e.observe(self._last_s - self._arrival_s)
            if self._num_tokens > 1:
                metrics.tpot.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        if timing is not None:
            metrics.queue.observe(timing.queue_s)
            metrics.prefill.observe(timing.prefill_s)
            metrics.adapter_load.observe(timing.adapter_load_s)
            metrics.kv_load.observe(timing.kv_load_s)
            metrics.decode_ttft.observe(timing.decode_ttft_s)


TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)

GAUGES = (
    ("vllm:num_requests_running", "Requests being computed.", "num_running"),
    ("vllm:num_requests_waiting", "Requests that wait for room or for their adapter.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", "kv_usage"),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:num_preemptions", "Times a running request gave its KV pages back.", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("moe_lora:engine_steps", "Steps of the engine.", "num_steps"),
    ("moe_lora:adapter_loads", "Adapters brought to the device.", "adapter_loads"),
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
        "moe_lora:pool_fetches",
        "Adapters fetched that the instance did not hold, by where they came from.",
        "source",
        (("peer", "pool_peer_fetches"), ("disk", "pool_disk_fetches")),
    ),
)
"""Counters whose label takes these values, and the field of each."""
TIERS = ("device", "host")
INSTANCE_GAUGES = (
    ("moe_lora:instance_up", "1 while the instance answers.", "live"),
    ("moe_lora:instance_silent", "1 while it gets no requests because it does not get on.", "silent"),
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


class EngineCollector:
    """The last known `EngineStats` as metric families; stats None: the engine is gone."""

    def __init__(self, model_name: str) -> None:
        self.stats: EngineStats | None = None
        self.max_loras = 0
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("moe_lora:engine_up", "1 while the engine answers.", labels=["model_name"])
        up.add_metric(self._label, self.stats is not None)
        yield up
        if self.stats is None:
            return
        for name, text, field in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._label, getattr(self.stats, field))
            yield gauge
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._label, getattr(self.stats, field))
            yield counter
        yield from self._cache(self.stats)
        yield from self._adapters(self.stats)
        yield from self._instances(self.stats.instances if isinstance(self.stats, FleetStats) else ())

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        """What the arenas hold, and what was found in them."""
        for name, text, label, fields in LABELLED:
            counter = CounterMetricFamily(name, text, labels=["model_name", label])
            for value, field in fields:
                counter.add_metric([*self._label, value], getattr(stats, field))
            yield counter
        labels = ["model_name", "tier"]
        size = GaugeMetricFamily("moe_lora:arena_bytes", "Size of each arena.", labels=labels)
        used = GaugeMetricFamily(
            "moe_lora:arena_used_bytes",
            "Of these, those in use, by what they hold.",
            labels=[*labels, "kind"],
        )
        for tier in TIERS:
            size.add_metric([*self._label, tier], getattr(stats, f"{tier}_bytes"))
            for kind in ("kv", "adapter"):
                used.add_metric([*self._label, tier, kind], getattr(stats, f"{tier}_{kind}_bytes"))
        yield size
        yield used
        invalid = GaugeMetricFamily(
            "moe_lora:kv_invalid_share",
            "Share of the device's KV whose adapter is not on the device, 0 to 1.",
            labels=["model_name"],
        )
        invalid.add_metric(self._label, stats.device_kv_invalid_bytes / max(1, stats.device_kv_bytes))
        yield invalid

    def _adapters(self, stats: EngineStats) -> Iterator[Metric]:
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of current requests; the value is the time.", labels=labels
        )
        running, waiting = ",".join(stats.running_adapters), ",".join(stats.waiting_adapters)
        info.add_metric([str(self.max_loras), running, waiting], time.time())
        yield info
        resident = GaugeMetricFamily(
            "moe_lora:adapter_resident", "1 for each adapter on the device.", labels=["adapter"]
        )
        for name in stats.resident_adapters:
            resident.add_metric([name], 1)
        yield resident

    def _instances(self, instances: tuple[InstanceStats, ...]) -> Iterator[Metric]:
        """Of several instances, each one's; without samples if there is but one engine."""
        labels = ["model_name", "instance"]
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
            *((GaugeMetricFamily(name, text, labels=labels), field) for name, text, field in INSTANCE_GAUGES),
            *(
                (CounterMetricFamily(name, text, labels=labels), field)
                for name, text, field in INSTANCE_COUNTERS
            ),
        ]
        for family, field in families:
            for instance in instances:
                family.add_metric([*self._label, instance.name], getattr(instance, field))
            yield family


class Metrics:
    """All metrics of one app, in a registry of its own."""

    def __init__(
        self,
        model_name: str,
        controller: ProvisionView | None = None,
        placement: PlacementView | None = None,
        link: ControllerLink | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(model_name)
        self.registry.register(self.engine)
        self.provision = None if controller is None else ProvisionCollector(model_name, controller)
        if self.provision is not None:
            self.registry.register(self.provision)
        if placement is not None:
            self.registry.register(PlacementCollector(model_name, placement))
        if link is not None:
            self.registry.register(LinkCollector(model_name, link))
        self._model_name = model_name
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "TTFT.", WAIT_BUCKETS_S)
        # One measure under the name in use and under the one that older dashboards read.
        gap = "Time from one token to the next."
        self.itl = (
            self._histogram("vllm:inter_token_latency_seconds", gap, TOKEN_BUCKETS_S),
            self._histogram("vllm:time_per_output_token_seconds", gap, TOKEN_BUCKETS_S),
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S
        )
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "TPOT: mean of a request.", TOKEN_BUCKETS_S
        )
        self.queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival in the engine until admitted.", WAIT_BUCKETS_S
        )
        self.prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Admitted until the first token.", WAIT_BUCKETS_S
        )
        self.adapter_load = self._histogram(
            "moe_lora:adapter_load_time_seconds", "Wait for the adapter to come in.", WAIT_BUCKETS_S
        )
        self.kv_load = self._histogram(
            "moe_lora:kv_load_time_seconds",
            "Wait for history to come in, beyond that for the adapter.",
            WAIT_BUCKETS_S,
        )
        self.decode_ttft = self._histogram(
            "moe_lora:decode_ttft_seconds",
            "Queueing, adapter load and first decode step; prefill excluded.",
            WAIT_BUCKETS_S,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model_name)

    def watch(self, visit: VisitView | None) -> RequestWatch:
        """A stopwatch for a request that arrives now.  visit: its part in the load on adapters, if any."""
        return RequestWatch(self, visit)

    def count(self, reason: str) -> None:
        self._success.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
