# SPDX-License-Identifier: Apache-2.0
"""Routing by a performance model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_lora.config import RANK_AWARE_COSTS
from moe_lora.core.request import RoutingStats
from moe_lora.timing.answer_lengths import FIRST_TOKENS
from moe_lora.timing.step_model import Row, StepModel, StepWork

from .routing import Instance, InstanceLoad, InstanceView, RequestListener, RoutedView, with_room

if TYPE_CHECKING:
    from moe_lora.policies.admission.host_start import HostStart


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of a decision.

    slo_tpot_s: limit of a decode step.  mean_output_tokens: Toppings' avg_resp_len; None: `AnswerMean`.
    adapter_load_s_per_rank: dLoRA section 5.1; 0 with host: the profile's.  host: start of prompts with
    missing adapters; None: wait for the load.
    """

    steps: StepModel
    slo_tpot_s: float = math.inf
    mean_output_tokens: float | None = None
    cost: str = RANK_AWARE_COSTS[0]
    adapter_load_s_per_rank: float = 0.0
    host: HostStart | None = None
    max_num_batched_tokens: int | None = None

    def start_s(self, prompt: Row) -> float:
        """Cost of a missing adapter: the load, or the host's extra time if less (Toppings section 4.1)."""
        load_s = self.adapter_load_s_per_rank * prompt.lora_rank
        if self.host is None:
            return load_s
        adapter = self.host.times.adapter(prompt.lora_rank)
        num_tokens = min(prompt.num_tokens, self.max_num_batched_tokens or prompt.num_tokens)
        start_s = self.host.start_s(num_tokens, adapter)
        return min(load_s, start_s) if load_s else start_s


@dataclass(frozen=True, slots=True)
class _Work:
    load: InstanceLoad
    num_changes: int
    queue: StepWork
    all: StepWork
    queue_s: float
    all_s: float


class _Known:
    """Recounted only after changes."""

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
        return Row(adapter, 0 if adapter is None else self._ranks.get(adapter, 0), num_tokens)

    def _count(self, load: InstanceLoad) -> _Work:
        model = self._model
        queue = model.work(self.row(adapter, num) for adapter, num in load.waiting_prompts.items())
        everything = model.work(
            self.row(adapter, num) for part in (load.running, load.waiting) for adapter, num in part.items()
        )
        times = (model.seconds("prefill", queue), model.seconds("decode", everything))
        return _Work(load, load.num_changes, queue, everything, *times)


@dataclass(frozen=True, slots=True)
class _Asked:
    """start_s: added if the adapter is missing."""

    prompt: Row
    token: Row
    start_s: float


class AnswerMean:
    """Running mean of answers' tokens.

    FIRST_TOKENS weighs FIRST_WEIGHT answers.  From MAX_WEIGHT answers on the mean follows the load.
    """

    FIRST_WEIGHT, MAX_WEIGHT = 8, 1000

    def __init__(self) -> None:
        self.tokens = FIRST_TOKENS
        self._weight = self.FIRST_WEIGHT

    def add(self, num_tokens: int) -> None:
        self._weight = min(self._weight + 1, self.MAX_WEIGHT)
        self.tokens += (num_tokens - self.tokens) / self._weight


class RankAware(RequestListener):
    """The instance of least cost: requests · (Δprefill / mean_output_tokens + Δdecode), infinite if the
    decode step would pass slo_tpot_s.

    Δ: the request's addition to a step, prefill over waiting prompts, decode over all requests.  With host
    workers Δprefill has `CostModel.start_s` too if the instance lacks the adapter.  `requests` counts present
    requests, so an idle instance costs nothing.  cost "all" adds the request's own time per token.  At equal
    costs the least token work decides; the paper takes the first.  Source: Toppings, section 5, Algorithm 1.
    """

    def __init__(self, model: CostModel, ranks: Mapping[str, int], max_loras: int | None = None) -> None:
        self._model = model
        self._max_loras = max_loras
        self._known = _Known(model.steps, ranks)
        self._answers = AnswerMean()
        self._num_choices = {"finite": 0, "infinite": 0}

    @property
    def mean_output_tokens(self) -> float:
        return self._model.mean_output_tokens or self._answers.tokens

    @property
    def stats(self) -> RoutingStats:
        return RoutingStats(num_choices=dict(self._num_choices), mean_output_tokens=self.mean_output_tokens)

    def stop(self, key: Hashable, answer_tokens: int) -> None:
        if answer_tokens:
            self._answers.add(answer_tokens)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        asked = self._ask(request)
        costs = [
            (self._cost_s(asked, one), one.outstanding_tokens, one.index, one)
            for one in with_room(request.adapter, instances, self._max_loras)
        ]
        cost_s, _, _, chosen = min(costs)
        self._num_choices["infinite" if cost_s == math.inf else "finite"] += 1
        return chosen

    def cost_s(self, request: RoutedView, instance: InstanceView) -> float:
        """Seconds per token."""
        return self._cost_s(self._ask(request), instance)

    def _ask(self, request: RoutedView) -> _Asked:
        prompt = self._known.row(request.adapter, request.prompt_tokens)
        cold = self._model.host is not None and request.adapter is not None
        start_s = self._model.start_s(prompt) if cold else 0.0
        return _Asked(prompt, Row(prompt.adapter, prompt.lora_rank), start_s)

    def _cost_s(self, asked: _Asked, instance: InstanceView) -> float:
        model, there = self._model, self._known.of(instance)
        decode_s = model.steps.seconds("decode", there.all, asked.token)
        if decode_s > model.slo_tpot_s:
            return math.inf
        counts_own = model.cost == "all"
        if not (there.all.num_tokens or counts_own):
            return 0.0
        prefill_s = model.steps.seconds("prefill", there.queue, asked.prompt)
        start_s = 0.0 if instance.load.has(asked.prompt.adapter) else asked.start_s
        mean = self.mean_output_tokens
        added_s = (prefill_s - there.queue_s + start_s) / mean + decode_s - there.all_s
        own_s = (prefill_s + start_s) / mean + decode_s if counts_own else 0.0
        return added_s * there.all.num_tokens + own_s


class ShortestPendingTime:
    """The instance of least queueing time plus, for a missing adapter, load time.

    Queueing: a prefill step over the waiting prompts, and the tokens left at the time of a decode step over
    all requests (max_num_seqs at most).  Loading: as `CostModel.start_s`.  Source: dLoRA, section 5.1,
    proactive dispatching.
    """

    def __init__(
        self, model: CostModel, ranks: Mapping[str, int], max_num_seqs: int, max_loras: int | None = None
    ) -> None:
        self._model = model
        self._max_loras = max_loras
        self._max_num_seqs = max_num_seqs
        self._known = _Known(model.steps, ranks)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        start_s = self._start_s(request)
        instances = with_room(request.adapter, instances, self._max_loras)
        return min(instances, key=lambda one: (self._pending_s(request.adapter, start_s, one), one.index))

    def pending_s(self, request: RoutedView, instance: InstanceView) -> float:
        """Estimated seconds until the start."""
        return self._pending_s(request.adapter, self._start_s(request), instance)

    def _start_s(self, request: RoutedView) -> float:
        if request.adapter is None:
            return 0.0
        return self._model.start_s(self._known.row(request.adapter, request.prompt_tokens))

    def _pending_s(self, adapter: str | None, start_s: float, instance: InstanceView) -> float:
        there = self._known.of(instance)
        queue_s = there.queue_s
        if there.all.num_tokens:
            left = max(0, instance.outstanding_tokens - instance.load.waiting_tokens)
            queue_s += left / max(there.all.num_tokens, self._max_num_seqs) * there.all_s
        return queue_s if instance.load.has(adapter) else queue_s + start_s
