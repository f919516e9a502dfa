# SPDX-License-Identifier: Apache-2.0
"""The merged adapter of a simulated instance: the engine's policies on the virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_lora.cache.orders import Readiness
from moe_lora.core.clock import Clock
from moe_lora.policies.merging.merging import Batching, MergingPolicy, MergingView
from moe_lora.policies.merging.merging_costs import Mode, Uid
from moe_lora.scheduling.views import Adapters

from .requests import CachedRequest


@dataclass(frozen=True, kw_only=True)
class SimMerging:
    """policy: makes an instance's policy.  merge_s: of a whole adapter, in or out.
    swap_steps: number of steps for a swap that is not urgent.
    """

    policy: Callable[[], MergingPolicy]
    merge_s: float
    swap_steps: int = 8


@dataclass(frozen=True, slots=True)
class LoraWork:
    """LoRA work of a step.

    rows: rows times the share of layers with their delta; a row with two deltas counts twice.
    adapters: with read matrices, each with its share of layers.
    """

    rows: float
    adapters: Mapping[str, float]


class SimMergedWeights:
    """Carries out a policy's decisions; a layer without the merged adapter is computed unmerged.

    num_steps: by mode.  num_merges: started merges.  swap_s: seconds of all swaps.
    """

    def __init__(self, config: SimMerging, adapters: Adapters[str], max_num_seqs: int, clock: Clock) -> None:
        self.num_steps: Counter[Mode] = Counter()
        self.num_merges = 0
        self.swap_s = 0.0
        self.policy = config.policy()
        self._config = config
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._carried: str | None = None
        self._share = 0.0
        self._batching = Batching()
        self._step_swap_s = 0.0

    def decide(self, requests: Sequence[CachedRequest], *, held_back: bool) -> frozenset[Uid] | None:
        """Call the policy and change the weights; adapters allowed to compute in this step, None: all.

        held_back: requests wait for an adapter slot.  A merged adapter without requests then leaves weights
        and slot.
        """
        view = MergingView(
            requests=requests,
            max_num_seqs=self._max_num_seqs,
            merged=self._carried if self._share == 1 else None,
            eligible=self._is_eligible,
            now_s=self._clock.now_s(),
            swapping=self._carried is not None and self._share < 1,
        )
        self._batching = self.policy.decide(view)
        target = self._batching.merge
        if held_back and all(request.adapter != target for request in requests):
            target = None
        assert target is None or isinstance(target, str)
        self._step_swap_s += self._move(target, self._batching.at_once)
        return self._batching.only

    def lora_work(self, rows: Mapping[str | None, float]) -> LoraWork:
        """LoRA work of a step with these rows per adapter, weighted by delta cost."""
        carried, share = self._carried, self._share
        others = {name: 1.0 for name in rows if name not in (carried, None)}
        num_others = sum(rows[name] for name in others)
        if carried is None:
            return LoraWork(num_others, others)
        own, base = rows.get(carried, 0), rows.get(None, 0)
        read = ((1 - share) if own else 0.0) + (share if others or base else 0.0)
        return LoraWork(own * (1 - share) + num_others * (1 + share) + base * share, others | {carried: read})

    def took(self, rows: Mapping[str | None, int], seconds: float) -> float:
        """Record a step of `seconds`; returns the extra time of weight changes since the last step."""
        mode: Mode = "unmerged"
        if self._carried is not None:
            mode = "merged" if self._share == 1 and set(rows) == {self._carried} else "mixed"
        self.num_steps[mode] += 1
        swap_s, self._step_swap_s = self._step_swap_s, 0.0
        self.swap_s += swap_s
        self.policy.took(self._batching, mode, sum(rows.values()), seconds + swap_s, swap_s)
        return swap_s

    def keep_apart(self, requests: Iterable[CachedRequest]) -> None:
        """Keep these requests' KV on weights with another adapter out of the prefix cache."""
        if self._carried is not None:
            for request in requests:
                request.unshared |= request.adapter != self._carried

    def _is_eligible(self, uid: Uid) -> bool:
        return isinstance(uid, str) and self._adapters.readiness(uid) is Readiness.READY

    def _move(self, target: str | None, at_once: bool) -> float:
        part = 1.0 if at_once else 1.0 / self._config.swap_steps
        moved = 0.0
        if self._carried is not None and self._carried != target:
            out = min(self._share, part)
            self._share = 0.0 if self._share - out < 1e-9 else self._share - out
            moved += out
            if not self._share:
                self._adapters.release(self._carried)
                self._carried = None
        if target is not None and self._carried in (None, target) and (at_once or not moved):
            if self._carried is None:
                if self._adapters.acquire(target) is not Readiness.READY:
                    return moved * self._config.merge_s
                self._carried = target
                self.num_merges += 1
            into = min(1.0 - self._share, part)
            self._share = 1.0 if self._share + into > 1 - 1e-9 else self._share + into
            moved += into
        return moved * self._config.merge_s
