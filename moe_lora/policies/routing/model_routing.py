# SPDX-License-Identifier: Apache-2.0
"""Routing by a performance model."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
"""Fewer exact costs take less time than bounds."""
_SLACK = 1e-9
"""Above the rounding error of `RankAware._bounds_s`, relative to its terms."""
_SMALL_SHARE = 1e-5
"""Of a smaller expert_share, a rounded 1 - expert_share keeps too few digits for _SLACK."""


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


@dataclass(slots=True, eq=False)
class _Work:
    """facts: a column, counted when read."""

    load: InstanceLoad
    num_changes: int
    queue: StepWork
    all: StepWork
    queue_s: float
    all_s: float
    facts: tuple[float, ...] = ()


class _ByColumns(ABC):
    """Facts of instances in columns; a choice first recounts changed loads."""

    def __init__(self, model: CostModel, ranks: Mapping[str, int], max_loras: int | None) -> None:
        self._model = model
        self._ranks = ranks
        self._max_loras = max_loras
        self._found: dict[int, _Work] = {}
        self._instances: list[InstanceView] = []
        self._loads: list[InstanceLoad] = []
        self._changes: list[int] = []
        self._columns = np.zeros((0, 0))
        """Of `_instances`, the latest, at `_changes` of `_loads`."""

    @abstractmethod
    def _facts(self, work: _Work) -> tuple[float, ...]:
        """A column."""

    def _read(self, instances: Sequence[InstanceView]) -> _Floats:
        """The facts of these instances."""
        if instances != self._instances:
            self._instances, self._loads = list(instances), [one.load for one in instances]
            self._changes = [one.num_changes for one in self._loads]
            self._columns = np.array([self._column(one) for one in instances]).T.copy()
            return self._columns
        changes = [one.num_changes for one in self._loads]
        if changes != self._changes:
            for at, (now, before) in enumerate(zip(changes, self._changes, strict=True)):
                if now != before:
                    self._columns[:, at] = self._column(instances[at])
            self._changes = changes
        return self._columns

    def _column(self, instance: InstanceView) -> tuple[float, ...]:
        work = self._of(instance)
        work.facts = work.facts or self._facts(work)
        return work.facts

    def _of(self, instance: InstanceView) -> _Work:
        load, work = instance.load, self._found.get(instance.index)
        if work is None or work.load is not load or work.num_changes != load.num_changes:
            work = self._found[instance.index] = self._count(load)
        return work

    def _row(self, adapter: str | None, num_tokens: int) -> Row:
        return Row(adapter, 0 if adapter is None else self._ranks.get(adapter, 0), num_tokens)

    def _has_room(self, adapter: str | None, instance: InstanceView) -> bool:
        return instance.load.has_room(adapter, self._max_loras)

    def _with_room(self, adapter: str | None, instances: Sequence[InstanceView]) -> list[int]:
        """Positions of the instances with room for the adapter, or of all."""
        found = [at for at, one in enumerate(instances) if self._has_room(adapter, one)]
        return found or [*range(len(instances))]

    def _lacking(self, adapter: str | None) -> NDArray[np.bool_]:
        """True for instances without the adapter, as `InstanceLoad.has`."""
        return np.array([adapter not in one.recent and adapter not in one.used for one in self._loads])

    def _count(self, load: InstanceLoad) -> _Work:
        model, ranks = self._model.steps, self._ranks
        queue, everything = (
            model.work([(adapter, ranks.get(adapter or "", 0), num) for adapter, num in part])
            for part in (load.waiting_prompts.items(), chain(load.running.items(), load.waiting.items()))
        )
        times = (model.seconds("prefill", queue), model.seconds("decode", everything))
        return _Work(load, load.num_changes, queue, everything, *times)


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
        self._unused = 1.0 - model.steps.expert_share
        self._slack = _SLACK * max(1.0, _SMALL_SHARE / model.steps.expert_share)
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

        Among more than _FEW, columns give each cost up to the slack; `cost_s` then decides among the lowest
        costs.  The least of all is the least of those with room if it has room.
        """
        asked = self._ask(request)
        if len(instances) <= _FEW:
            fitting = [instances[at] for at in self._with_room(request.adapter, instances)]
            least_s, chosen = self._least_exactly(asked, fitting)
        else:
            bounds_s = self._bounds_s(asked, self._read(instances))
            least_s, chosen = self._least(asked, instances, *bounds_s)
            if not self._has_room(request.adapter, chosen):
                positions = self._with_room(request.adapter, instances)
                fitting = [instances[at] for at in positions]
                least_s, chosen = self._least(asked, fitting, *(one[positions] for one in bounds_s))
        self._num_choices["infinite" if least_s == math.inf else "finite"] += 1
        return chosen

    def _least(
        self, asked: _Asked, instances: Sequence[Instance], lowest_s: _Floats, highest_s: _Floats
    ) -> tuple[float, Instance]:
        """The least, and its cost or an upper bound."""
        least_s = highest_s.min()
        lowest = (lowest_s <= min(least_s, sys.float_info.max)).nonzero()[0]
        chosen = [instances[at] for at in lowest]
        if len(chosen) > (least_s < math.inf) and (lowest_s[lowest] < highest_s[lowest]).any():
            least_s, least = self._least_exactly(asked, chosen)
            if least_s < math.inf:
                return least_s, least
        return least_s, min(instances if least_s == math.inf else chosen, key=_OUTSTANDING)

    def _least_exactly(self, asked: _Asked, instances: Sequence[Instance]) -> tuple[float, Instance]:
        costs_s = self._costs_s(asked, instances)
        least_s = min(costs_s)
        chosen = [one for one, cost_s in zip(instances, costs_s, strict=True) if cost_s == least_s]
        return least_s, min(chosen, key=_OUTSTANDING)

    def _costs_s(self, asked: _Asked, instances: Sequence[InstanceView]) -> list[float]:
        """Each `_cost_s`, once for equal states."""
        if len(instances) <= _FEW:
            return [self._cost_s(asked, self._of(one)) for one in instances]
        costs_s, known, adapter = [], dict[Hashable, float](), asked.prompt.adapter
        for one in instances:
            load = one.load
            tokens = load.used.get(adapter, 0), load.waiting_prompts.get(adapter, 0)
            state = self._column(one), tokens, load.has(adapter)
            if state not in known:
                known[state] = self._cost_s(asked, self._of(one))
            costs_s.append(known[state])
        return costs_s

    def _facts(self, work: _Work) -> tuple[float, ...]:
        """For `_bounds_s`: decode with a further request, then prefill; last, other terms of `_cost_s`."""
        decode, prefill, token = work.all, work.queue, work.all.num_tokens + 1
        padded_s = self._model.steps.coefficients["decode"][3] * token
        decode_s, _ = self._rest_s("decode", decode, token)
        prefill_s, unread_s = self._rest_s("prefill", prefill, prefill.num_tokens)
        return (
            *(decode_s, padded_s, decode.largest_rank, work.all_s, decode.num_tokens),
            *(prefill_s + unread_s, unread_s, prefill.num_tokens, prefill.largest_rank, work.queue_s),
            *(*decode.terms()[4:], *prefill.terms()[4:]),
        )

    def _rest_s(self, phase: str, work: StepWork, num_tokens: int) -> tuple[float, float]:
        """Seconds of terms without the extra row's rank; seconds of the unread experts."""
        step, token, experts, _, rank, adapter_rank, expert_rank = self._model.steps.coefficients[phase]
        ranks, adapter_ranks, expert_ranks = work.terms()[4:]
        unread_s = experts * self._unused**num_tokens
        ranks_s = rank * ranks + adapter_rank * adapter_ranks + expert_rank * expert_ranks
        return step + token * num_tokens + experts - unread_s + ranks_s, unread_s

    def _bounds_s(self, asked: _Asked, facts: _Floats) -> tuple[_Floats, _Floats]:
        """Bounds of `_cost_s`: `StepWork.terms` and `_cost_s` in another order of additions."""
        adapter, lora_rank, num_tokens = asked.prompt
        model, padded_token_s = self._model, self._model.steps.coefficients["prefill"][3]
        limit_s, slack, mean = model.slo_tpot_s, self._slack, asked.mean_tokens
        decode_s, padded_s, largest, all_s, rows = facts[:5]
        prefill_s, unread_s, queued, queued_rank, queue_s = facts[5:10]
        # The rows of the adapter there.  The base model has rank 0, and no such terms.
        used = [one.used.get(adapter, 0) for one in self._loads] if lora_rank else []
        prompts = [one.waiting_prompts.get(adapter, 0) for one in self._loads] if any(used) else []
        decode_s = decode_s + padded_s * np.maximum(largest, lora_rank)
        decode_s += self._added_s("decode", lora_rank, 1, used)
        prefill_s = prefill_s - self._unused**num_tokens * unread_s
        prefill_s += (queued + num_tokens) * (padded_token_s * np.maximum(queued_rank, lora_rank))
        prefill_s += self._added_s("prefill", lora_rank, num_tokens, prompts)
        if asked.start_s:
            prefill_s += asked.start_s * self._lacking(adapter)
        own_s = prefill_s / mean + decode_s
        counts_own = model.cost == "all"
        costs_s = (own_s - queue_s / mean - all_s) * rows
        if counts_own:
            costs_s += own_s
        own_s *= slack * (rows + counts_own)
        lowest_s, highest_s = costs_s - own_s, costs_s + own_s
        if decode_s.max() > limit_s * (1 - slack):
            lowest_s[decode_s > limit_s * (1 + slack)] = math.inf
            highest_s[decode_s > limit_s * (1 - slack)] = math.inf
        return lowest_s, highest_s

    def _added_s(self, phase: str, lora_rank: int, num_tokens: int, before: Sequence[int]) -> _Floats | float:
        """Seconds of a row beside `before` tokens of its adapter; empty: none anywhere."""
        _, token, _, _, rank, adapter_rank, expert_rank = self._model.steps.coefficients[phase]
        share_s = expert_rank * lora_rank * (1.0 - self._unused**num_tokens)
        distinct_s = adapter_rank * lora_rank if num_tokens else 0.0
        added_s = lora_rank * rank * num_tokens + distinct_s + share_s
        if phase == "prefill":
            added_s += token * num_tokens
        if not any(before):
            return added_s
        number = np.array(before, float)
        return added_s - share_s * (1.0 - self._unused**number) - distinct_s * (number > 0)

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
        pending_s = self.pending_s(request, instances)
        chosen = instances[int(pending_s.argmin())]
        if self._has_room(request.adapter, chosen):
            return chosen
        positions = self._with_room(request.adapter, instances)
        return instances[positions[pending_s[positions].argmin()]]

    def pending_s(self, request: RoutedView, instances: Sequence[InstanceView]) -> _Floats:
        """Estimated seconds until the start at each instance."""
        queue_s, all_s, waiting_tokens, num_seats = self._read(instances)
        outstanding = np.array([one.outstanding_tokens for one in instances], float)
        pending_s = queue_s + np.maximum(0.0, outstanding - waiting_tokens) / num_seats * all_s
        if request.adapter is not None:
            start_s = self._model.start_s(self._row(request.adapter, request.prompt_tokens))
            if start_s:
                pending_s[self._lacking(request.adapter)] += start_s
        return pending_s

    def _facts(self, work: _Work) -> tuple[float, ...]:
        num_tokens = max(work.all.num_tokens, self._max_num_seqs)
        return work.queue_s, work.all_s, work.load.waiting_tokens, num_tokens
