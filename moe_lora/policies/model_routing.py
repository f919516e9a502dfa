"""Routing by a performance model: Toppings' rank-aware cost, dLoRA's shortest pending time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .routing import Instance, InstanceLoad, InstanceView, RoutedView
from .step_model import Row, StepModel, StepWork


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What a decision costs by.  steps: times of batches.  slo_tpot_s: time of a decode step that must not be
    passed.  mean_output_tokens: Toppings' avg_resp_len.  adapter_load_s_per_rank: time to bring in an adapter
    by its rank (dLoRA section 5.1).  Checked as `RoutingConfig`.
    """

    steps: StepModel
    slo_tpot_s: float = math.inf
    mean_output_tokens: float = 128.0
    adapter_load_s_per_rank: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """What an instance had to do when it was last looked at, as the model counts it."""

    load: InstanceLoad
    num_changes: int
    queue: StepWork
    all: StepWork
    queue_s: float
    all_s: float


class _Known:
    """Batches of instances, counted anew only where requests came, began or ended since."""

    def __init__(self, model: StepModel, ranks: Mapping[str, int]) -> None:
        self._model = model
        self._ranks = ranks
        self._found: dict[int, _Work] = {}

    def of(self, instance: InstanceView) -> _Work:
        load, work = instance.load, self._found.get(instance.index)
        if work is None or work.load is not load or work.num_changes != load.num_changes:
            work = self._found[instance.index] = self._count(load)
        return work

    def row(self, adapter: str | None, num_tokens: int) -> Row:
        """The base model, and an adapter whose rank is not known, have rank 0."""
        return Row(adapter, 0 if adapter is None else self._ranks.get(adapter, 0), num_tokens)

    def _count(self, load: InstanceLoad) -> _Work:
        model = self._model
        queue = model.work(self.row(adapter, num) for adapter, num in load.waiting_prompts.items())
        everything = model.work(
            self.row(adapter, num) for part in (load.running, load.waiting) for adapter, num in part.items()
        )
        times = (model.seconds("prefill", queue), model.seconds("decode", everything))
        return _Work(load, load.num_changes, queue, everything, *times)


class RankAware:
    """The instance whose requests, and this one, lose least time: requests · (Δprefill / mean_output_tokens +
    Δdecode), infinite where the decode step would pass slo_tpot_s.

    Δ: what the request adds to a step, prefill over the prompts that wait, decode over all requests.
    `requests` counts those that are there, so an idle instance costs nothing, as in the paper.  Of equal
    costs (all infinite, or several idle) the least token work left decides, then the index; the paper takes
    the first.  ranks: of the adapters; a live mapping may be given.  Source: Toppings, Algorithm 1.
    """

    def __init__(self, model: CostModel, ranks: Mapping[str, int]) -> None:
        self._model = model
        self._known = _Known(model.steps, ranks)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        prompt = self._known.row(request.adapter, request.prompt_tokens)
        token = Row(prompt.adapter, prompt.lora_rank)
        return min(
            instances,
            key=lambda one: (self._cost_s(prompt, token, one), one.outstanding_tokens, one.index),
        )

    def cost_s(self, request: RoutedView, instance: InstanceView) -> float:
        """The cost of a request there, in seconds per token of all requests."""
        prompt = self._known.row(request.adapter, request.prompt_tokens)
        return self._cost_s(prompt, Row(prompt.adapter, prompt.lora_rank), instance)

    def _cost_s(self, prompt: Row, token: Row, instance: InstanceView) -> float:
        model, there = self._model, self._known.of(instance)
        decode_s = model.steps.seconds("decode", there.all, token)
        if decode_s > model.slo_tpot_s:
            return math.inf
        if not there.all.num_tokens:
            return 0.0
        prefill_s = model.steps.seconds("prefill", there.queue, prompt) - there.queue_s
        return (prefill_s / model.mean_output_tokens + decode_s - there.all_s) * there.all.num_tokens


class ShortestPendingTime:
    """The instance with the least queueing time plus, where the adapter is not there, time to load it.

    Queueing: one prefill step over the prompts that wait, and the tokens left at the time of a decode step
    over all its requests, each of which yields a token for each of them, or for max_num_seqs if these are
    more: a batch with room left is as short a queue as its work is little.
    Loading: adapter_load_s_per_rank · rank.  Source: dLoRA, section 5.1, proactive dispatching.
    """

    def __init__(self, model: CostModel, ranks: Mapping[str, int], max_num_seqs: int) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._known = _Known(model.steps, ranks)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda one: (self.pending_s(request.adapter, one), one.index))

    def pending_s(self, adapter: str | None, instance: InstanceView) -> float:
        """Estimated time until the instance begins with a request for the adapter."""
        there = self._known.of(instance)
        queue_s = there.queue_s
        if there.all.num_tokens:
            left = max(0, instance.outstanding_tokens - instance.load.waiting_tokens)
            queue_s += left / max(there.all.num_tokens, self._max_num_seqs) * there.all_s
        if adapter is None or instance.load.has(adapter):
            return queue_s
        return queue_s + self._model.adapter_load_s_per_rank * self._known.row(adapter, 1).lora_rank
