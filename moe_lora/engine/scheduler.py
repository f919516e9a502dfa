"""Continuous batching: which sequences compute how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moe_lora.cache.blocks import BlockManager
from moe_lora.core.clock import Clock
from moe_lora.policies.admission import admissible, shortest_first

from .residency import Residency
from .sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """`num_tokens` of a sequence from its first uncomputed one; `samples` if its last token is among them."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.sequence.num_uncomputed == self.num_tokens


class Scheduler:
    """Decode rows first, then prefill chunks, then newcomers, within the step's token budget.

    shortest_first: newcomers by `policies.admission.shortest_first` instead of by arrival.
    """

    def __init__(
        self,
        blocks: BlockManager,
        residency: Residency,
        clock: Clock,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        starvation_s: float,
        shortest_first: bool = False,
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._blocks = blocks
        self._residency = residency
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._starvation_s = starvation_s
        self._shortest_first = shortest_first

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        if sequence.adapter is not None:
            sequence.adapter.num_waiting += 1

    def schedule(self) -> list[Scheduled]:
        """The next step's work; its pages are reserved.  Empty if nothing can run."""
        plan: dict[Sequence, int] = {}
        budget = self._max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            if budget and sequence in self.running:
                budget -= self._continue(sequence, budget, plan)
        budget = self._max_num_batched_tokens - sum(plan.values())
        self._admit(budget, plan)
        return [Scheduled(sequence, num_tokens) for sequence, num_tokens in plan.items()]

    def finish(self, sequence: Sequence) -> None:
        """The sequence ended (or its client left), wherever it is."""
        if sequence in self.running:
            self._stop_running(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._stop_waiting(sequence)

    def _continue(self, sequence: Sequence, budget: int, plan: dict[Sequence, int]) -> int:
        """Plan a running sequence's next tokens, preempting the youngest ones if pages run out."""
        num_tokens = min(sequence.num_uncomputed, budget)
        while not self._blocks.grow(sequence.table, sequence.num_computed + num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            plan.pop(victim, None)
            if victim is sequence:
                return 0
        plan[sequence] = num_tokens
        return num_tokens

    def _admit(self, budget: int, plan: dict[Sequence, int]) -> None:
        if not self.waiting or not self._has_room(budget):
            return
        queue = shortest_first(self.waiting) if self._shortest_first else list(self.waiting)
        now_s = self._clock.now_s()
        for sequence in admissible(queue, self._acquire, now_s, self._starvation_s):
            if not self._start(sequence, budget, plan):
                if sequence.adapter is not None:
                    self._residency.release(sequence.adapter)
                return
            budget -= plan[sequence]
            if not self._has_room(budget):
                return
        for sequence in self.waiting:
            if sequence.held_back_s is None and sequence.admitted_s is None:
                sequence.held_back_s = now_s

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self.running) < self._max_num_seqs

    def _acquire(self, sequence: Sequence) -> bool:
        if sequence.adapter is None:
            return True
        start_s = self._clock.now_s()
        if not self._residency.acquire(sequence.adapter):
            return False
        if sequence.admitted_s is None:  # later loads, after a preemption, are no part of the first wait
            sequence.adapter_load_s += self._clock.now_s() - start_s
        return True

    def _start(self, sequence: Sequence, budget: int, plan: dict[Sequence, int]) -> bool:
        """Move a waiting sequence (whose adapter is pinned) to the running ones if its pages can be had."""
        table = self._blocks.match(sequence.adapter_uid, sequence.tokens)
        num_cached = len(table.blocks) * self._blocks.block_size
        num_tokens = min(len(sequence.tokens) - num_cached, budget)
        if not self._blocks.grow(table, num_cached + num_tokens):
            self._blocks.release(table)
            return False
        self.waiting.remove(sequence)
        self._stop_waiting(sequence)
        self.running.append(sequence)
        sequence.table, sequence.num_computed = table, num_cached
        if sequence.admitted_s is None:
            sequence.admitted_s = self._clock.now_s()
            sequence.num_cached = num_cached
        plan[sequence] = num_tokens
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's pages; it starts over from its tokens when there is room again."""
        if sequence.adapter is not None:
            sequence.adapter.num_waiting += 1
        self._stop_running(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._blocks.release(sequence.table)
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter)

    def _stop_waiting(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            sequence.adapter.num_waiting -= 1
            self._residency.settle(sequence.adapter)
