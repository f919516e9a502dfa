"""Routing by a performance model: Toppings' rank-aware cost, dLoRA's shortest pending time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .instance_load import InstanceLoad
from .performance import Batch, PerformanceModel
from .routing import Instance, InstanceView, RoutedView


class RankAware:
    """The instance whose requests, and this one, lose least time: requests · (Δprefill / mean_output_tokens +
    Δdecode), infinite where the decode iteration would pass slo_s.

    Δ: what the request adds to an iteration, prefill over those that wait, decode over all.  `requests`
    counts those that are there, so an idle instance costs nothing, as in the paper.  Of equal costs (all
    infinite, or several idle) the least token work left decides, then the index; the paper takes the first.
    ranks: of the adapters; a live mapping may be given.  Source: Toppings, Algorithm 1.
    """

    def __init__(self, model: PerformanceModel, ranks: Mapping[str, int]) -> None:
        self._model = model
        self._ranks = ranks

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        rank = 0 if request.adapter is None else self._ranks.get(request.adapter, 0)
        return min(
            instances, key=lambda one: (self.cost_s(rank, one.load), one.outstanding_tokens, one.index)
        )

    def cost_s(self, lora_rank: int, load: InstanceLoad) -> float:
        """The cost of a request of this rank, in seconds per token of all that are there."""
        model = self._model
        queue = Batch.of(load.waiting, self._ranks)
        exists = queue + Batch.of(load.running, self._ranks)
        prefill_s = model.seconds(model.prefill, queue.with_one(lora_rank)) - model.seconds(
            model.prefill, queue
        )
        decode_s = model.seconds(model.decode, exists.with_one(lora_rank))
        if decode_s > model.slo_s:
            return math.inf
        cost_s = prefill_s / model.mean_output_tokens + decode_s - model.seconds(model.decode, exists)
        return cost_s * exists.num_requests


class ShortestPendingTime:
    """The instance with the least queueing time plus, where the adapter is not there, time to load it.

    Queueing: token_s for each token of work left; loading: adapter_load_s_per_rank · rank.
    Source: dLoRA, section 5.1, proactive dispatching.
    """

    def __init__(self, model: PerformanceModel, ranks: Mapping[str, int]) -> None:
        self._model = model
        self._ranks = ranks

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda one: (self.pending_s(request.adapter, one), one.index))

    def pending_s(self, adapter: str | None, instance: InstanceView) -> float:
        """Estimated time until the instance begins with a request for the adapter."""
        queue_s = instance.outstanding_tokens * self._model.token_s
        if adapter is None or instance.load.has(adapter):
            return queue_s
        return queue_s + self._model.adapter_load_s_per_rank * self._ranks.get(adapter, 0)
