# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics (docs/reference/prometheus.md)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import AdapterInfo, EngineStats, ModelInfo, RequestTiming

if TYPE_CHECKING:
    from moe_lora.core.records import ServerState
    from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
    from moe_lora.dist.cluster.controller.controller_link import ControllerLink
    from moe_lora.engine.client.messages import KnownAliases
    from moe_lora.provision.online import Visit

TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
QUEUE_REFUSALS = ("queue", "client_queue", "queue_time")
PREEMPTION_BUCKETS = (0, 1, 2, 3, 5, 10, 20, 50, 100)
SIZE_BUCKETS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "TTFT.", WAIT_BUCKETS_S),
    "e2e": ("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S),
    "tpot": ("vllm:request_time_per_output_token_seconds", "TPOT: mean of a request.", TOKEN_BUCKETS_S),
    "queue_s": ("vllm:request_queue_time_seconds", "Arrival in the engine until admitted.", WAIT_BUCKETS_S),
    "prefill_s": ("vllm:request_prefill_time_seconds", "Admitted until the first token.", WAIT_BUCKETS_S),
    "decode_s": ("vllm:request_decode_time_seconds", "First token to the last.", REQUEST_BUCKETS_S),
    "inference_s": ("vllm:request_inference_time_seconds", "Admitted to last token.", REQUEST_BUCKETS_S),
    "num_preemptions": ("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS),
    "adapter_load_s": (
        "moe_lora:adapter_load_time_seconds",
        "Wait for the adapter to come in.",
        WAIT_BUCKETS_S,
    ),
    "kv_load_s": (
        "moe_lora:kv_load_time_seconds",
        "Wait for history to come in, beyond that for the adapter.",
        WAIT_BUCKETS_S,
    ),
    "decode_ttft_s": (
        "moe_lora:decode_ttft_seconds",
        "Queueing, adapter load and first decode step; prefill excluded.",
        WAIT_BUCKETS_S,
    ),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request.", SIZE_BUCKETS),
    "generation_tokens": ("vllm:request_generation_tokens", "Tokens of an answer.", SIZE_BUCKETS),
    "most_tokens": ("vllm:request_max_num_generation_tokens", "As request_generation_tokens.", SIZE_BUCKETS),
    "max_tokens": ("vllm:request_params_max_tokens", "max_tokens of a request that has it.", SIZE_BUCKETS),
    "num_choices": ("vllm:request_params_n", "n of the request, for each of its answers.", SIZE_BUCKETS),
}
TIMINGS = ("queue_s", "prefill_s", "adapter_load_s", "kv_load_s", "decode_ttft_s", "num_preemptions")
"""`RequestTiming` fields with a histogram."""
GAP_NAMES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""The current name, and an older name."""
OTHER = "other"
"""Series of names above the bound."""


class Metrics:
    """Metrics of one app, in a separate registry.

    stats, info, adapters, server: None without an answer.  by_adapter, by_tenant: None if `metrics_by_name`
    is 0.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        controller: ClusterController | ControllerLink,
        refusals: Iterable[str] = (),
    ) -> None:
        self.stats: EngineStats | None = None
        self.info: ModelInfo | None = None
        self.adapters: Sequence[AdapterInfo] | None = None
        self.server: ServerState | None = None
        self.aliases: KnownAliases | None = None
        self.by_adapter: CountsByName | None = None
        self.by_tenant: CountsByName | None = None
        self.model_name = model_name = cluster.served_model_name
        self._cluster, self._controller = cluster, controller
        self._registry = CollectorRegistry()
        self._registry.register(self)
        labels = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=self._registry)
        self._refused = self._counts_by_reason(
            "moe_lora:http_refused",
            "Requests and connections that limits of the front end, keys and their rates refused or ended.",
            refusals,
        )
        self._rejected = self._counts_by_reason(
            "vllm:admission_rejections",
            "Of moe_lora:http_refused, requests that limits of the queue refused.",
            QUEUE_REFUSALS,
        )
        self.histograms = {
            key: Histogram(name, text, labels[:1], buckets=buckets, registry=self._registry).labels(
                model_name
            )
            for key, (name, text, buckets) in HISTOGRAMS.items()
        }
        if limit := cluster.front_end.metrics_by_name:
            self.by_adapter = CountsByName("adapter", limit, WAIT_BUCKETS_S, fixed=[model_name])
            self.by_tenant = CountsByName("tenant", limit, WAIT_BUCKETS_S)
        self._gap_counts = [0] * (len(TOKEN_BUCKETS_S) + 1)
        self._gaps_s = 0.0

    def _counts_by_reason(self, name: str, text: str, reasons: Iterable[str]) -> dict[str, Counter]:
        counter = Counter(name, text, ["model_name", "reason"], registry=self._registry)
        return {reason: counter.labels(self.model_name, reason) for reason in reasons}

    def gaps(self, gap_s: float, count: int) -> None:
        """Count `count` equal times between tokens."""
        self._gap_counts[bisect_left(TOKEN_BUCKETS_S, gap_s)] += count
        self._gaps_s += gap_s * count

    def count(self, reason: str) -> None:
        """Count a finished request."""
        self._success.labels(self.model_name, reason).inc()

    def refuse(self, reason: str) -> None:
        """Count a refusal; one of `refusals`."""
        self._refused[reason].inc()
        if reason in self._rejected:
            self._rejected[reason].inc()

    def show(
        self,
        info: ModelInfo | None,
        stats: EngineStats | None,
        adapters: Sequence[AdapterInfo] | None,
        server: ServerState | None,
    ) -> bytes:
        """Prometheus text of the engine's present state and all counts; drops series of unserved adapters."""
        self.info, self.stats, self.adapters, self.server = info, stats, adapters, server
        if self.by_adapter is not None and adapters is not None:
            self.by_adapter.remove_all_but({one.name for one in adapters})
        return self.render()

    def collect(self) -> Iterator[Metric]:
        """Families of each scrape, for prometheus_client."""
        from . import metric_families as families

        name = self.model_name
        max_loras = 0 if self.info is None else self.info.max_loras
        yield from families.engine_families(name, self.stats, max_loras)
        yield families.cache_config_family(name, self._cluster.engine, self.info)
        yield families.loaded_family(self.adapters or (), self._cluster.front_end.metrics_by_name)
        for counts in (self.by_adapter, self.by_tenant):
            if counts is not None:
                yield from counts.collect(name)
        if self.aliases is not None and self.aliases.live:
            from .aliases import share_family

            yield share_family(name, self.aliases.live, self._cluster.front_end.metrics_by_name)
        cluster, figures = self._cluster, self._controller.figures
        if cluster.provisioning is not None:
            yield from families.table(GaugeMetricFamily, families.OUTLOOK_GAUGES, name, figures.outlook)
        if cluster.lora_server is not None:
            yield from families.server_families(name, self.server)
        if cluster.front_end.placement is not None:
            has_points = cluster.front_end.operating_points is not None
            yield from families.placement_families(name, figures, has_points)
        if self._controller.link is not None:
            yield from families.link_families(name, self._controller.link)
        text = "Time from one token to the next."
        for gap_name in GAP_NAMES:
            times = (TOKEN_BUCKETS_S, self._gap_counts, self._gaps_s)
            yield families.histogram(gap_name, text, name, *times)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class RequestWatch:
    """Stamps the tokens of one choice, for the metrics and, as `visit`, the load on adapters."""

    __slots__ = (
        "_adapter",
        "_arrival_s",
        "_first_s",
        "_last_s",
        "_max_tokens",
        "_metrics",
        "_num_choices",
        "_num_tokens",
        "_prompt_tokens",
        "_tenant",
        "_visit",
    )

    is_timed = True

    def __init__(
        self,
        metrics: Metrics,
        visit: Visit | None,
        *,
        adapter: str | None = None,
        tenant: str = "",
        prompt_tokens: int = 0,
        max_tokens: int | None = None,
        num_choices: int = 1,
    ) -> None:
        self._max_tokens, self._num_choices = max_tokens, num_choices
        self._metrics = metrics
        self._visit = visit
        self._adapter = adapter
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        self._arrival_s = self._first_s = self._last_s = time.perf_counter()
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        """Record tokens that arrived now, with equal times."""
        if not num_tokens:
            return
        now_s = time.perf_counter()
        if self._num_tokens:
            self._metrics.gaps((now_s - self._last_s) / num_tokens, num_tokens)
        else:
            self._first_s = now_s
            self._metrics.histograms["ttft"].observe(now_s - self._arrival_s)
            if self._visit is not None:
                self._visit.start()
        self._last_s = now_s
        self._num_tokens += num_tokens

    def end(self, reason: str, timing: RequestTiming | None) -> None:
        """Record the request's end; "refused" is not counted."""
        if reason == "refused":
            if self._visit is not None:
                self._visit.refuse()
            return
        if self._visit is not None:
            self._visit.end(timing)
        self._metrics.count(reason)
        if self._metrics.by_adapter is not None:
            self._count_by_name(reason)
        histograms = self._metrics.histograms
        if reason in ("stop", "length"):
            histograms["e2e"].observe(self._last_s - self._arrival_s)
            histograms["decode_s"].observe(self._last_s - self._first_s)
            if self._num_tokens > 1:
                histograms["tpot"].observe((self._last_s - self._first_s) / (self._num_tokens - 1))
            if timing is not None:
                histograms["inference_s"].observe(self._last_s - self._arrival_s - timing.queue_s)
            histograms["prompt_tokens"].observe(self._prompt_tokens)
            histograms["generation_tokens"].observe(self._num_tokens)
            histograms["most_tokens"].observe(self._num_tokens)
            histograms["num_choices"].observe(self._num_choices)
            if self._max_tokens is not None:
                histograms["max_tokens"].observe(self._max_tokens)
        if timing is not None:
            for name in TIMINGS:
                histograms[name].observe(getattr(timing, name))

    def _count_by_name(self, reason: str) -> None:
        metrics, tokens = self._metrics, self._num_tokens
        ttft_s = self._first_s - self._arrival_s if tokens else None
        for counts, name in (
            (metrics.by_adapter, self._adapter or metrics.model_name),
            (metrics.by_tenant, self._tenant),
        ):
            if counts is not None and name:
                counts.add(name, reason, self._prompt_tokens, tokens, ttft_s, is_timed=self.is_timed)


class BackgroundWatch(RequestWatch):
    """Counts without latency, as background requests wait for others."""

    __slots__ = ()
    is_timed = False

    def tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def end(self, reason: str, timing: RequestTiming | None) -> None:
        if reason == "refused":
            return
        self._metrics.count(reason)
        if self._metrics.by_adapter is not None:
            self._count_by_name(reason)


class _Counts:
    """Counts of one name."""

    __slots__ = ("generation_tokens", "prompt_tokens", "requests", "ttft_counts", "ttft_s")

    def __init__(self, num_buckets: int) -> None:
        self.requests: dict[str, int] = {}
        self.prompt_tokens = self.generation_tokens = 0
        self.ttft_counts = [0] * num_buckets
        self.ttft_s = 0.0


class CountsByName:
    """The first `limit` names have a series each; further names share `OTHER`.

    label: "adapter" or "tenant".  fixed: names beside the limit.
    """

    def __init__(
        self, label: str, limit: int, bounds_s: Sequence[float], fixed: Collection[str] = ()
    ) -> None:
        self._label = label
        self._limit = limit + len(fixed)
        self._bounds_s = bounds_s
        self._fixed = frozenset(fixed)
        self._counts = {name: self._new() for name in fixed}
        self._other: _Counts | None = None

    def _new(self) -> _Counts:
        return _Counts(len(self._bounds_s) + 1)

    def add(
        self,
        name: str,
        reason: str,
        prompt_tokens: int,
        generation_tokens: int,
        ttft_s: float | None,
        *,
        is_timed: bool = True,
    ) -> None:
        """Count a finished request.  ttft_s: None without a token: the prompt does not count."""
        counts = self._counts.get(name)
        if counts is None:
            counts = self._first(name)
        counts.requests[reason] = counts.requests.get(reason, 0) + 1
        counts.generation_tokens += generation_tokens
        if ttft_s is not None:
            counts.prompt_tokens += prompt_tokens
        if ttft_s is not None and is_timed:
            counts.ttft_counts[bisect_left(self._bounds_s, ttft_s)] += 1
            counts.ttft_s += ttft_s

    def _first(self, name: str) -> _Counts:
        if name != OTHER and len(self._counts) < self._limit:
            counts = self._counts[name] = self._new()
            return counts
        if self._other is None:
            self._other = self._new()
        return self._other

    def remove_all_but(self, names: Collection[str]) -> None:
        """Keep the series of these names alone."""
        for name in self._counts.keys() - self._fixed - set(names):
            del self._counts[name]

    def collect(self, model_name: str) -> Iterator[Metric]:
        label, found = self._label, dict(self._counts)
        if self._other is not None:
            found[OTHER] = self._other
        what, labels = f"moe_lora:{label}", ["model_name", label]
        requests = CounterMetricFamily(
            f"{what}_requests", f"Finished requests by {label}.", labels=[*labels, "finished_reason"]
        )
        prompts = CounterMetricFamily(
            f"{what}_prompt_tokens", f"Prompt tokens of these, by {label}.", labels=labels
        )
        answers = CounterMetricFamily(
            f"{what}_generation_tokens", f"Tokens generated, by {label}.", labels=labels
        )
        ttft = HistogramMetricFamily(
            f"{what}_time_to_first_token_seconds", f"TTFT by {label}.", labels=labels
        )
        bounds = [*(str(float(bound)) for bound in self._bounds_s), "+Inf"]
        for name, counts in found.items():
            values = [model_name, name]
            for reason, number in counts.requests.items():
                requests.add_metric([*values, reason], number)
            prompts.add_metric(values, counts.prompt_tokens)
            answers.add_metric(values, counts.generation_tokens)
            buckets = list(zip(bounds, accumulate(counts.ttft_counts), strict=True))
            ttft.add_metric(values, buckets, counts.ttft_s)
        yield from (requests, prompts, answers, ttft)
