# SPDX-License-Identifier: Apache-2.0
"""Routing by a performance model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_lora.config import RANK_AWARE_COSTS
from moe_lora.core.request import RoutingStats
from moe_lora.timing.answer_lengths import FIRST_TOKENS
from moe_lora.timing.step_model import Row, StepModel, StepWork

from .routing import Instance, InstanceLoad, InstanceView, RequestListener, RoutedView

if TYPE_CHECKING:
    from moe_lora.policies.admission.host_start import HostStart

_Floats = NDArray[np.float64]
_OUTSTANDING = attrgetter("outstanding_tokens")
_FEW = 8
"""Fewer costs are computed without a look for equal states."""
_PHASES = ("decode", "prefill")
_SLACK = 1e-9
"""Above the rounding error of `RankAware._bounds_s`, relative to its terms; expert_share: above 1e-5."""


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
    queue: StepWork
    all: StepWork
    queue_s: float
    all_s: float


class _ByColumns:
    """Keeps facts of instances in columns; a change of a load recounts its column."""

    def __init__(self, model: CostModel, ranks: Mapping[str, int], max_loras: int | None) -> None:
        self._model = model
        self._ranks = ranks
        self._max_loras = max_loras
        self._works: dict[int, _Work] = {}
        self._columns = np.zeros((0, 0))
        self._instances: list[InstanceView] = []
        self._loads: list[InstanceLoad] = []
        self._at: slice | NDArray[np.intp] = slice(0)
        """The columns of `_instances`, the latest."""

    def _facts(self, work: _Work) -> tuple[float, ...]:
        """A column."""
        raise NotImplementedError

    def _note_tokens(self, index: int, load: InstanceLoad, adapter: str | None) -> None:
        """Called after a change of an adapter's requests."""

    def _read(self, instances: Sequence[InstanceView]) -> _Floats:
        """The facts of these instances."""
        if instances != self._instances:
            for one in instances:
                self._of(one)
            self._instances, self._loads = list(instances), [one.load for one in instances]
            indices, self._positions = [one.index for one in instances], np.arange(len(instances))
            self._at = slice(len(indices)) if indices == [*range(len(indices))] else np.array(indices)
        return self._columns[:, self._at]

    def _of(self, instance: InstanceView) -> _Work:
        index, load, before = instance.index, instance.load, self._works.get(instance.index)
        if before is not None and before.load is load:
            return before
        load.watchers += (partial(self._change, index, load),)
        self._recount(index, load)
        for adapter in {*load.used, *(before.load.used if before else ())}:
            self._note_tokens(index, load, adapter)
        return self._works[index]

    def _row(self, adapter: str | None, num_tokens: int) -> Row:
        return Row(adapter, 0 if adapter is None else self._ranks.get(adapter, 0), num_tokens)

    def _has_room(self, adapter: str | None, instance: InstanceView) -> bool:
        return instance.load.has_room(adapter, self._max_loras)

    def _with_room(self, adapter: str | None) -> list[int]:
        """Positions of the instances with room for the adapter, or of all."""
        found = [at for at, one in enumerate(self._instances) if self._has_room(adapter, one)]
        return found or [*range(len(self._instances))]

    def _lacking(self, adapter: str | None) -> NDArray[np.bool_]:
        """True for instances without the adapter, as `InstanceLoad.has`."""
        return np.array([adapter not in one.recent and adapter not in one.used for one in self._loads])

    def _change(self, index: int, load: InstanceLoad, adapter: str | None) -> None:
        if self._works[index].load is load:
            self._recount(index, load)
            self._note_tokens(index, load, adapter)

    def _recount(self, index: int, load: InstanceLoad) -> None:
        self._works[index] = work = self._count(load)
        if index >= self._columns.shape[1]:
            self._columns = _widened(self._columns, len(self._facts(work)), 2 * index + 8)
        self._columns[:, index] = self._facts(work)

    def _count(self, load: InstanceLoad) -> _Work:
        model, ranks = self._model.steps, self._ranks
        queue, everything = (
            model.work([(adapter, ranks.get(adapter or "", 0), num) for adapter, num in part])
            for part in (load.waiting_prompts.items(), chain(load.running.items(), load.waiting.items()))
        )
        times = (model.seconds("prefill", queue), model.seconds("decode", everything))
        return _Work(load, queue, everything, *times)


def _widened(columns: _Floats, num_rows: int, num_columns: int) -> _Floats:
    wider = np.zeros((num_rows, num_columns))
    wider[: len(columns), : columns.shape[1]] = columns
    return wider


@dataclass(frozen=True, slots=True)
class _Asked:
    """start_s: added if the adapter is missing."""

    prompt: Row
    token: Row
    start_s: float
    mean_tokens: float


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


class RankAware(_ByColumns, RequestListener):
    """The instance of least cost: requests · (Δprefill / mean_output_tokens + Δdecode), infinite if the
    decode step would pass slo_tpot_s.

    Δ: the request's addition to a step, prefill over waiting prompts, decode over all requests.  With host
    workers Δprefill has `CostModel.start_s` too if the instance lacks the adapter.  `requests` counts present
    requests, so an idle instance costs nothing.  cost "all" adds the request's own time per token.  At equal
    costs the least token work decides; the paper takes the first.  Source: Toppings, section 5, Algorithm 1.
    """

    def __init__(self, model: CostModel, ranks: Mapping[str, int], max_loras: int | None = None) -> None:
        super().__init__(model, ranks, max_loras)
        self._tokens: dict[str, _Floats] = {}
        self._unused = 1.0 - model.steps.expert_share
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
        """The least (`cost_s`, token work, index) of the instances with room, or of all.

        Columns give each cost up to _SLACK.  `cost_s` then decides among the lowest costs.  The least of all
        is the least of those with room if it has room.
        """
        asked, facts, before = self._ask(request), self._read(instances), None
        if request.adapter in self._tokens:
            before = self._tokens_of(request.adapter)[:, self._at]
        missing = self._lacking(request.adapter) if asked.start_s else None
        lowest_s, highest_s = self._bounds_s(asked, facts, before, missing)
        state = [one for one in (facts, before, missing) if one is not None]

        def least(at: slice | list[int]) -> tuple[float, Instance]:
            positions, lowest, least_s = self._positions[at], lowest_s[at], highest_s[at].min()
            chosen = positions[lowest <= least_s if least_s < math.inf else lowest < math.inf].tolist()
            if len(chosen) > (least_s < math.inf):
                works = [self._of(instances[one]) for one in chosen]
                if len(chosen) > _FEW:
                    rows = np.concatenate([one[..., chosen].reshape(-1, len(chosen)) for one in state])
                    if (rows == rows[:, :1]).all():
                        works = works[:1]
                costs_s = [self._cost_s(asked, one) for one in works]
                least_s = min(costs_s)
                if len(works) == len(chosen):
                    chosen = [one for one, cost_s in zip(chosen, costs_s, strict=True) if cost_s == least_s]
            chosen = positions if least_s == math.inf else chosen
            return least_s, min([instances[one] for one in chosen], key=_OUTSTANDING)

        least_s, chosen = least(slice(None))
        if not self._has_room(request.adapter, chosen):
            least_s, chosen = least(self._with_room(request.adapter))
        self._num_choices["infinite" if least_s == math.inf else "finite"] += 1
        return chosen

    def _facts(self, work: _Work) -> tuple[float, ...]:
        """For `_bounds_s`: decode with a further request, prefill; last, other terms of `_cost_s`."""
        decode, prefill, token = work.all, work.queue, work.all.num_tokens + 1
        padded_s = self._model.steps.coefficients["decode"][3] * token
        decode_s, _ = self._rest_s("decode", decode, token)
        prefill_s, experts_s = self._rest_s("prefill", prefill, prefill.num_tokens)
        return (
            *(decode_s, padded_s, decode.largest_rank, work.all_s, decode.num_tokens, _SLACK * token),
            *(prefill_s + experts_s, experts_s, prefill.num_tokens, prefill.largest_rank, work.queue_s),
            *(*decode.terms()[4:], *prefill.terms()[4:]),
        )

    def _rest_s(self, phase: str, work: StepWork, num_tokens: int) -> tuple[float, float]:
        """Seconds of terms without the extra row's rank; seconds of the unread experts."""
        step, token, experts, _, rank, adapter_rank, expert_rank = self._model.steps.coefficients[phase]
        ranks, adapter_ranks, expert_ranks = work.terms()[4:]
        unread_s = experts * self._unused**num_tokens
        ranks_s = rank * ranks + adapter_rank * adapter_ranks + expert_rank * expert_ranks
        return step + token * num_tokens + experts - unread_s + ranks_s, unread_s

    def _note_tokens(self, index: int, load: InstanceLoad, adapter: str | None) -> None:
        if adapter is None:
            return
        tokens = self._tokens_of(adapter)
        numbers = load.used.get(adapter, 0), load.waiting_prompts[adapter]
        tokens[:, index] = *numbers, *(1.0 - self._unused**number for number in numbers)
        if not tokens[0].any():
            del self._tokens[adapter]

    def _tokens_of(self, adapter: str) -> _Floats:
        """By instance: rows of a decode step, tokens of waiting prompts; experts read by either."""
        tokens = self._tokens.get(adapter, np.zeros((4, 0)))
        if tokens.shape[1] < self._columns.shape[1]:
            self._tokens[adapter] = tokens = _widened(tokens, 4, self._columns.shape[1])
        return tokens

    def _bounds_s(
        self, asked: _Asked, facts: _Floats, before: _Floats | None, missing: NDArray[np.bool_] | None
    ) -> tuple[_Floats, _Floats]:
        """Bounds of `_cost_s`: `StepWork.terms` and `_cost_s` in another order of additions."""
        _, lora_rank, num_tokens = asked.prompt
        model, padded_token_s = self._model, self._model.steps.coefficients["prefill"][3]
        limit_s = model.slo_tpot_s
        decode_s, padded_s, largest, all_s, rows, slack = facts[:6]
        (prefill_s, unread_s, queued, queued_rank, queue_s), mean = facts[6:11], asked.mean_tokens
        decode_s = decode_s + padded_s * np.maximum(largest, lora_rank)
        decode_s += self._added_s("decode", lora_rank, 1, before)
        prefill_s = prefill_s - self._unused**num_tokens * unread_s
        prefill_s += (queued + num_tokens) * (padded_token_s * np.maximum(queued_rank, lora_rank))
        prefill_s += self._added_s("prefill", lora_rank, num_tokens, before)
        if missing is not None:
            prefill_s += asked.start_s * missing
        own_s = prefill_s / mean + decode_s
        costs_s = (own_s - queue_s / mean - all_s) * rows
        if model.cost == "all":
            costs_s += own_s
        own_s *= slack
        lowest_s, highest_s = costs_s - own_s, costs_s + own_s
        if decode_s.max() > limit_s * (1 - _SLACK):
            lowest_s[decode_s > limit_s * (1 + _SLACK)] = math.inf
            highest_s[decode_s > limit_s * (1 - _SLACK)] = math.inf
        return lowest_s, highest_s

    def _added_s(
        self, phase: str, lora_rank: int, num_tokens: int, before: _Floats | None
    ) -> _Floats | float:
        """Seconds of a row beside other rows of its adapter."""
        _, token, _, _, rank, adapter_rank, expert_rank = self._model.steps.coefficients[phase]
        share_s = expert_rank * lora_rank * (1.0 - self._unused**num_tokens)
        distinct_s = adapter_rank * lora_rank if num_tokens else 0.0
        added_s = lora_rank * rank * num_tokens + distinct_s + share_s
        if phase == "prefill":
            added_s += token * num_tokens
        if before is None:
            return added_s
        number, read = before[_PHASES.index(phase) :: 2]
        less = read * share_s
        if distinct_s:
            less += (number > 0) * distinct_s
        return added_s - less

    def cost_s(self, request: RoutedView, instance: InstanceView) -> float:
        """Seconds per token."""
        return self._cost_s(self._ask(request), self._of(instance))

    def _ask(self, request: RoutedView) -> _Asked:
        prompt = self._row(request.adapter, request.prompt_tokens)
        cold = self._model.host is not None and request.adapter is not None
        start_s = self._model.start_s(prompt) if cold else 0.0
        return _Asked(prompt, Row(prompt.adapter, prompt.lora_rank), start_s, self.mean_output_tokens)

    def _cost_s(self, asked: _Asked, there: _Work) -> float:
        model = self._model
        decode_s = model.steps.seconds("decode", there.all, asked.token)
        if decode_s > model.slo_tpot_s:
            return math.inf
        counts_own = model.cost == "all"
        if not (there.all.num_tokens or counts_own):
            return 0.0
        prefill_s = model.steps.seconds("prefill", there.queue, asked.prompt)
        start_s, mean = asked.start_s, asked.mean_tokens
        if start_s and there.load.has(asked.prompt.adapter):
            start_s = 0.0
        added_s = (prefill_s - there.queue_s + start_s) / mean + decode_s - there.all_s
        own_s = (prefill_s + start_s) / mean + decode_s if counts_own else 0.0
        return added_s * there.all.num_tokens + own_s


class ShortestPendingTime(_ByColumns):
    """The instance of least queueing time plus, for a missing adapter, load time.

    Queueing: a prefill step over the waiting prompts, and the tokens left at the time of a decode step over
    all requests (max_num_seqs at most).  Loading: as `CostModel.start_s`.  Source: dLoRA, section 5.1,
    proactive dispatching.
    """

    def __init__(
        self, model: CostModel, ranks: Mapping[str, int], max_num_seqs: int, max_loras: int | None = None
    ) -> None:
        super().__init__(model, ranks, max_loras)
        self._max_num_seqs = max_num_seqs

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        queue_s, all_s, waiting_tokens, num_seats = self._read(instances)
        outstanding = np.array([one.outstanding_tokens for one in instances], float)
        pending_s = queue_s + np.maximum(0.0, outstanding - waiting_tokens) / num_seats * all_s
        if start_s := self._start_s(request):
            pending_s[self._lacking(request.adapter)] += start_s
        chosen = instances[pending_s.argmin()]
        if self._has_room(request.adapter, chosen):
            return chosen
        positions = self._with_room(request.adapter)
        return instances[positions[pending_s[positions].argmin()]]

    def _facts(self, work: _Work) -> tuple[float, ...]:
        num_tokens = max(work.all.num_tokens, self._max_num_seqs)
        return work.queue_s, work.all_s, work.load.waiting_tokens, num_tokens

    def pending_s(self, request: RoutedView, instance: InstanceView) -> float:
        """Estimated seconds until the start."""
        return self._pending_s(request.adapter, self._start_s(request), instance)

    def _start_s(self, request: RoutedView) -> float:
        if request.adapter is None:
            return 0.0
        return self._model.start_s(self._row(request.adapter, request.prompt_tokens))

    def _pending_s(self, adapter: str | None, start_s: float, instance: InstanceView) -> float:
        there = self._of(instance)
        queue_s = there.queue_s
        if there.all.num_tokens:
            left = max(0, instance.outstanding_tokens - instance.load.waiting_tokens)
            queue_s += left / max(there.all.num_tokens, self._max_num_seqs) * there.all_s
        return queue_s if instance.load.has(adapter) else queue_s + start_s
