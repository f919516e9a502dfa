# SPDX-License-Identifier: Apache-2.0
"""Decisions on a merged adapter between steps, on rank 0.

An error of an adapter on rank 0 restores the weights, and keeps the adapter unmerged until the next load; an
error of the policy ends merging.  An error of another rank ends the engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.config import EngineConfig
from moe_lora.core.clock import Clock
from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.engine.sequence import Sequence
from moe_lora.policies.merging.merging import Batching, MergingPolicy, MergingView, make_merging_policy
from moe_lora.policies.merging.merging_costs import MergingCosts, Mode, Uid
from moe_lora.scheduling.views import Scheduled
from moe_lora.timing.step_model import bytes_per_rank, expected_step_times, expected_swap_times

from .merged_weights import MergedAdapter, MergeOrder, Piece, RoundingErrors

if TYPE_CHECKING:
    from moe_lora.engine.ranks.rank import Rank
    from moe_lora.engine.step.runner import ModelRunner

logger = logging.getLogger(__name__)
_COPY_BYTES, _NUM_COPIES = 64 << 20, 3
_LOOK_AGAIN_S = 1.0
"""Between looks at the host's free memory."""


@dataclass(frozen=True)
class MergeLimits:
    """step_bytes: of weights a step, at least one piece.  max_error: rounding error, enforced or for a log
    line.
    """

    step_bytes: float
    max_error: float
    enforced: bool


class Merging:
    """Calls the policy before each step; the weights follow at once, or within `limits`."""

    def __init__(
        self,
        policy: MergingPolicy,
        runner: ModelRunner,
        adapters: AdapterManager,
        clock: Clock,
        *,
        max_num_seqs: int,
        limits: MergeLimits,
        host_free: Callable[[], int],
    ) -> None:
        assert runner.merged is not None
        self._counters = dict.fromkeys(("steps_merged", "steps_mixed", "merges", "unmerges"), 0)
        self._seconds = {"merge_s": 0.0, "unmerge_s": 0.0}
        self._weights = runner.merged
        self._policy = policy
        self._runner = runner
        self._adapters = adapters
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._limits = limits
        self._host_free = host_free
        self._promised: set[tuple[str, ...]] = set()
        """Target modules of adapters, with host memory for their original weights."""
        self._look_again_s: dict[tuple[str, ...], float] = {}
        """By unmerged target modules."""
        self._is_off = False
        """The policy failed."""
        self._refused: set[Uid] = set()
        """Adapters with a failed merge or measurement."""
        adapters.on_drop = self._forget
        self._errors = RoundingErrors(runner.merged)
        self._logged: set[str] = set()
        self._carried: AdapterVersion | None = None
        """The partly or fully merged adapter."""
        self._pieces: list[Piece] = []
        self._num_in = 0
        self._batching = Batching()
        self._swap_s = 0.0
        self._start_s = 0.0

    @property
    def _is_whole(self) -> bool:
        return self._carried is not None and self._num_in == len(self._pieces)

    def decide(self, requests: list[Sequence], *, held_back: bool) -> frozenset[Uid] | None:
        """Decide the next step and change the weights; returns the computing adapters, None for all.

        requests: in FCFS order.  held_back: a request waits for a slot: unmerge an adapter without a request.
        """
        self._start_s, self._swap_s = self._clock.now_s(), 0.0
        self._errors.begin_step()
        view = MergingView(
            requests=requests,
            max_num_seqs=self._max_num_seqs,
            merged=self._carried.uid if self._carried is not None and self._is_whole else None,
            eligible=self._is_eligible,
            now_s=self._start_s,
            swapping=self._carried is not None and not self._is_whole,
        )
        self._batching = Batching(at_once=True)
        if not self._is_off:
            with self._ending_at_errors():
                self._batching = self._policy.decide(view)
        merge = self._batching.merge
        if merge is not None and (
            not self._is_eligible(merge)
            or (held_back and all(request.adapter_uid != merge for request in requests))
        ):
            self._batching = replace(self._batching, merge=None)
        self._move(self._adapters.versions.get(self._batching.merge), at_once=self._batching.at_once)
        return self._batching.only

    def tend(self) -> None:
        """Without requests: unmerge an unloaded adapter."""
        carried = self._carried
        if carried is not None and (carried.retired or self._is_off) and not carried.num_running:
            self.give_up()

    def give_up(self) -> None:
        """Unmerge at once: the merged adapter's pages are wanted."""
        self._move(None, at_once=True)

    def took(self, plan: Iterable[Scheduled[Sequence]]) -> None:
        """After a step: count, inform the policy, and exclude other requests' KV from the prefix cache."""
        items = list(plan)
        mode: Mode = "unmerged"
        if self._carried is not None and self._num_in:
            others = [
                one
                for one in (item.sequence for item in items)
                if one.adapter is not self._carried or one.base_tokens
            ]
            for sequence in others:
                sequence.unshared = True
            mode = "mixed" if others or not self._is_whole else "merged"
        if mode != "unmerged":
            self._counters[f"steps_{mode}"] += 1
        num_rows = sum(item.num_tokens for item in items)
        seconds = self._clock.now_s() - self._start_s
        if not self._is_off:
            with self._ending_at_errors():
                self._policy.took(self._batching, mode, num_rows, seconds, self._swap_s)

    def figures(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        kept = self._weights.weights.kept_bytes()
        return {**self._counters, **self._seconds, "merge_kept_bytes": kept}

    def _is_eligible(self, uid: Uid) -> bool:
        adapter = self._adapters.versions.get(uid)
        if adapter is None or adapter.retired or uid in self._refused or not self._adapters.is_ready(adapter):
            return False
        try:
            if not self._can_be_merged(adapter):
                return False
            error = self._error(adapter)
        except Exception as problem:
            self._refuse(adapter, problem)
            return False
        return not self._limits.enforced or (error is not None and error <= self._limits.max_error)

    @contextmanager
    def _ending_at_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._is_off = True
            logger.error("merging is off until the instance starts again: its policy failed", exc_info=error)

    def _forget(self, adapter: AdapterVersion) -> None:
        self._refused.discard(adapter.uid)
        content_hash, targets = adapter.packed.content_hash, adapter.packed.targets
        if all(other.packed.targets != targets for other in self._adapters.versions.values()):
            self._promised.discard(targets)
            self._look_again_s.pop(targets, None)
        if all(other.packed.content_hash != content_hash for other in self._adapters.versions.values()):
            self._errors.forget(content_hash)
            self._logged.discard(content_hash)
        with self._ending_at_errors():
            self._policy.forget(adapter.uid)

    def _refuse(self, adapter: AdapterVersion, error: Exception) -> None:
        self._refused.add(adapter.uid)
        self._errors.forget(adapter.packed.content_hash)
        logger.error(
            "adapter %s version %d is not merged any more until its next load: merging it failed",
            *(adapter.name, adapter.version),
            exc_info=error,
        )

    def _restore(self, adapter: AdapterVersion, error: Exception) -> None:
        """Restore all ranks' weights, after an error of this adapter.

        Raises `error` if the restore fails.
        """
        self._refuse(adapter, error)
        carried, self._carried, self._num_in = self._carried, None, 0
        if carried is not None:
            try:
                self._runner.swap(MergeOrder(_known(carried), (), fold_in=False, last=True))
            except Exception as problem:
                logger.exception("the weights can't be restored")
                raise error from problem
            self._adapters.release_merged(carried)

    def _can_be_merged(self, adapter: AdapterVersion) -> bool:
        """True with mergeable parts, and host memory for the originals; False with scaled columns."""
        targets, weights = adapter.packed.targets, self._weights.weights
        if adapter.packed.has_columns:
            return False
        if targets in self._promised:
            return True
        now_s, again_s = self._clock.now_s(), self._look_again_s.get(targets)
        if again_s is not None and now_s < again_s:
            return False
        if not weights.bytes_of(targets):
            self._look_again_s[targets] = math.inf
            return False
        self._look_again_s[targets] = now_s + _LOOK_AGAIN_S
        changed = weights.kept_modules.union(*self._promised)
        total, before = weights.bytes_of(changed.union(targets)), weights.bytes_of(changed)
        # Promised memory is not free.
        more, promised = total - before, before - weights.kept_bytes()
        free = max(0, self._host_free() - promised) if more else 0
        if more <= free:
            self._promised.add(targets)
        elif again_s is None:
            logger.warning(
                "adapter %s and all with its target modules stay unmerged: the original weights would "
                "take %.1f MB on the host in each process, where %.1f MB are free; give the host more "
                "memory, or adapters fewer target modules",
                *(adapter.name, more / 1e6, free / 1e6),
            )
        return targets in self._promised

    def _error(self, adapter: AdapterVersion) -> float | None:
        error, content_hash = self._errors.of(_known(adapter)), adapter.packed.content_hash
        if error is not None and content_hash not in self._logged:
            self._logged.add(content_hash)
            problem = (
                "it stays unmerged" if self._limits.enforced else "only batching=auto would keep it unmerged"
            )
            logger.log(
                logging.WARNING if error > self._limits.max_error else logging.INFO,
                "adapter %s: merging changes its deltas by %.2g of them%s",
                *(adapter.name, error, f"; {problem}" if error > self._limits.max_error else ""),
            )
        return error

    def _move(self, target: AdapterVersion | None, *, at_once: bool) -> None:
        start_s = self._clock.now_s()
        budget = float("inf") if at_once else self._limits.step_bytes
        while budget > 0:
            concerned = self._carried or target
            try:
                used = self._advance(target, budget)
            except EngineDeadError:
                raise
            except Exception as error:
                assert concerned is not None
                self._restore(concerned, error)
                break
            if used is None:
                break
            budget -= used
        if target is not None and self._carried is target and self._weights.needs_no_server:
            self._adapters.give_lease_back(target)
        self._swap_s += self._clock.now_s() - start_s

    def _advance(self, target: AdapterVersion | None, budget: float) -> float | None:
        """Change towards the target; returns the bytes, None without a change."""
        if self._carried is not None and self._carried is not target:
            return self._take_out(budget) if self._adapters.take_lease_again(self._carried) else None
        if self._carried is None and target is not None:
            return 0.0 if self._begin(target) else None
        return None if self._is_whole or target is None else self._fold_in(budget)

    def _begin(self, adapter: AdapterVersion) -> bool:
        """Hold the adapter; False without mergeable parts, or if not ready."""
        self._pieces = self._weights.pieces(_known(adapter))
        if not self._pieces or not self._adapters.hold_merged(adapter):
            return False
        self._carried, self._num_in = adapter, 0
        return True

    def _fold_in(self, budget: float) -> float:
        assert self._carried is not None
        start_s = self._clock.now_s()
        pieces, num_bytes = self._some(self._pieces[self._num_in :], budget)
        self._num_in += len(pieces)
        self._runner.swap(MergeOrder(_known(self._carried), pieces, True, self._is_whole))
        self._seconds["merge_s"] += self._clock.now_s() - start_s
        self._counters["merges"] += self._is_whole
        return num_bytes

    def _take_out(self, budget: float) -> float:
        assert self._carried is not None
        start_s = self._clock.now_s()
        pieces, num_bytes = self._some(self._pieces[: self._num_in][::-1], budget)
        self._num_in -= len(pieces)
        self._runner.swap(MergeOrder(_known(self._carried), pieces, False, not self._num_in))
        self._seconds["unmerge_s"] += self._clock.now_s() - start_s
        if not self._num_in:
            self._counters["unmerges"] += 1
            adapter, self._carried = self._carried, None
            self._adapters.release_merged(adapter)
        return num_bytes

    def _some(self, pieces: list[Piece], budget: float) -> tuple[tuple[Piece, ...], float]:
        some: list[Piece] = []
        num_bytes = 0
        for piece in pieces:
            size = self._weights.weights.num_bytes(piece)
            if some and num_bytes + size > budget:
                break
            some.append(piece)
            num_bytes += size
        return tuple(some), max(1, num_bytes)


def _known(adapter: AdapterVersion) -> MergedAdapter:
    slot = -1 if adapter.slot is None else adapter.slot
    return MergedAdapter(adapter.uid, slot, adapter.packed.content_hash)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the best copy."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        start_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _COPY_BYTES / best_s


def make_merging(
    config: EngineConfig,
    rank: Rank,
    runner: ModelRunner,
    adapters: AdapterManager,
    clock: Clock,
    host_free: Callable[[], int],
) -> Merging:
    """Merging by the settings; first times by this device's bandwidth."""
    assert runner.merged is not None
    versions, weights = adapters.versions, runner.merged.weights
    costs = None
    if config.batching in ("dlora", "auto"):
        bandwidth, itemsize = copy_bandwidth(rank.device), rank.dtype.itemsize
        per_rank = sum(bytes_per_rank(rank.shape, itemsize))

        def lora_rank(uid: Uid) -> int:
            """Assumes the adapter is on all usual sites."""
            return max(1, round(versions[uid].packed.nbytes / per_rank)) if uid in versions else 0

        def num_bytes(uid: Uid) -> int:
            return weights.bytes_of(versions[uid].packed.targets) if uid in versions else 0

        costs = MergingCosts(
            expected_step_times(
                rank.shard.shape, itemsize, config.lora_kernel, bandwidth, config.expert_parallel
            ),
            lora_rank,
            expected_swap_times(num_bytes, bandwidth),
        )
    return Merging(
        make_merging_policy(config.batching, costs, config.dlora),
        runner,
        adapters,
        clock,
        max_num_seqs=config.max_num_seqs,
        limits=MergeLimits(
            config.merge_mb_per_step * 1e6, config.merge_error_limit, enforced=config.batching == "auto"
        ),
        host_free=host_free,
    )
