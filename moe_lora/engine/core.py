# SPDX-License-Identifier: Apache-2.0
"""One engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import Readiness
from moe_lora.core.errors import AdapterVersionError, CapacityError, EngineDeadError, MoeLoraError
from moe_lora.core.request import (
    STEP_BUCKETS,
    AdapterInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    TokenLogprobs,
    TokenOutput,
)
from moe_lora.core.shape import ModelShape
from moe_lora.engine.adapters.adapter_store import PASSING, AdapterVersion
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.engine.adapters.transfers import Transfers
from moe_lora.engine.client.step_notes import StepNotes
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.sampler import Drawn, Sampler
from moe_lora.lora.row_routing import content_number
from moe_lora.scheduling.scheduler import Scheduler
from moe_lora.scheduling.views import Scheduled

from .sequence import Sequence, check_request

if TYPE_CHECKING:
    from moe_lora.engine.merging.merging import Merging
    from moe_lora.engine.moving import RequestMoves
    from moe_lora.engine.ranks.rank import Rank


class StepUnderWay(NamedTuple):
    """A launched step.  drawn: a token for each sequence."""

    sequences: list[Sequence]
    drawn: Drawn


logger = logging.getLogger(__name__)

NUM_TRIES = 3
"""Consecutive empty plans before the oldest request counts as impossible."""
COUNTED = (
    *("num_steps", "step_tokens", "prompt_tokens", "generation_tokens"),
    *("prefix_query_tokens", "prefix_hit_tokens"),
)


class EngineCore:
    """Scheduler, runner and sampler of one instance; not thread-safe.

    stalled: the last step found no sequence to run.
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler[Sequence],
        runner: ModelRunner,
        adapters: AdapterManager,
        transfers: Transfers,
        sampler: Sampler,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self.adapters = adapters
        self.transfers = transfers
        self.sampler = sampler
        self._clock = scheduler.clock
        self._merging: Merging | None = None
        self._under_way: StepUnderWay | None = None
        self._notes: StepNotes | None = None
        self._sequences: dict[str, Sequence] = {}
        self._make_moves: Callable[..., RequestMoves] | None = None
        self._moves: RequestMoves | None = None
        self.at_close: list[Callable[[], None]] = []
        """Called at the engine's end."""
        self.rank: Rank
        """This process's rank, for a sleep."""
        self.stalled = self.suspended = False
        self._num_empty = 0
        self._failed: list[AdapterVersion] = []
        """Adapters whose requests end with the next step."""
        transfers.on_load = self._note_load
        adapters.store.on_failure = adapters.failures.report
        self._counters = dict.fromkeys(COUNTED, 0)
        self._step_counts = [0] * (len(STEP_BUCKETS) + 1)

    @property
    def shape_and_dtype(self) -> tuple[ModelShape, torch.dtype]:
        contents = self.adapters.contents
        return contents.shape, contents.dtype

    @property
    def moves(self) -> RequestMoves:
        """Created at the first use."""
        if self._moves is None:
            assert self._make_moves is not None, "attach_moves comes first"
            self._moves = self._make_moves(self._sequences, self._scheduler, self._clock)
        return self._moves

    def answer_beside(self, method: str, args: tuple[Any, ...]) -> Callable[[], Any] | None:
        """As `RequestMoves.answer_beside`."""
        return None if self._moves is None else self._moves.answer_beside(method, *args)

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """By request id."""
        return self._sequences

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) and not self.suspended

    def suspend(self) -> None:
        """Release all pages; no step runs while `suspended`."""
        self._scheduler.preempt_all()
        self.suspended = True

    @property
    def held_back(self) -> bool:
        """True if a request waited for a slot at the last plan."""
        return self._scheduler.held_back and bool(self._scheduler.waiting)

    def watch(self, on_loss: Callable[[EngineDeadError], None], on_change: Callable[[], None]) -> None:
        """Set callbacks for other threads.

        on_loss: another process ended unexpectedly.  on_change: a waiting request may start.
        """
        self.transfers.on_change = self.sampler.on_change = on_change
        self.adapters.store.on_change = on_change
        self.transfers.followers.watch(on_loss)

    def attach_merging(self, merging: Merging) -> None:
        """Let `merging` choose the merged adapter before each step."""
        self._merging = merging

    def attach_moves(self, make_moves: Callable[..., RequestMoves]) -> None:
        """Let requests move between instances."""
        self._make_moves = make_moves

    def attach_notes(self, notes: StepNotes) -> None:
        """Note adapters before loads and steps, for diagnosis after a death."""
        self._notes = notes
        self.transfers.on_bring = lambda adapter: notes.start_load(adapter.name)

    def close(self, *, at_once: bool = False) -> None:
        """End connections and processes; `at_once`: without a wait."""
        notes, self._notes = self._notes, None
        if notes is not None and not at_once:  # else the notes keep the cause
            notes.close()
        self.transfers.close()
        if self._moves is not None:
            self._moves.close()
        for close in self.at_close:
            close()
        self.adapters.store.close()
        self.transfers.followers.close(at_once=at_once)

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return new tokens.

        With `Sampler.ahead`, the tokens of the step before: tokens after an end are dropped.
        """
        self.tend()
        gains = self._end_failed() if self._failed else []
        if self.sampler.only_tokens is not None:
            gains += self.sampler.only_tokens(self._scheduler.running, self._take_only)
        plan = self._schedule()
        if self._failed:
            gains += self._end_failed()
        self.stalled = not (plan or gains or self._under_way)
        gains += self._compute(plan) if plan else self.catch_up()
        if self._moves is not None:
            gains += self._moves.announce()
            gains += [self._finish(*one) for one in self._moves.give_way()]
            self.stalled = self.stalled and not gains
        return gains if gains or plan else self._refuse_impossible()

    def _compute(self, plan: SequenceOf[Scheduled[Sequence]]) -> list[TokenOutput]:
        self._num_empty = 0
        try:
            step = self._launch(plan)
        except Exception as error:
            if not self._runner.can_repeat(error):
                raise
            return self._run_apart(plan, error)
        gains = self.catch_up()
        if self.adapters.store.host is not None:
            return gains + self._complete(step, plan)
        self._account(plan)
        self._under_way = step
        if not self.sampler.ahead:
            return gains + self.catch_up()
        for number, sequence in enumerate(step.sequences):
            if self._goes_on(sequence):
                sequence.expect(number)
        return gains

    def _account(self, plan: SequenceOf[Scheduled[Sequence]]) -> None:
        self._counters["num_steps"] += 1
        num_tokens = 0
        for item in plan:
            is_prompt = item.sequence.num_computed < len(item.sequence.request.prompt_token_ids)
            num_tokens += item.num_tokens + item.samples if is_prompt and item.num_tokens > 1 else 1
        self._counters["step_tokens"] += num_tokens
        self._step_counts[bisect_left(STEP_BUCKETS, num_tokens)] += 1
        for sequence in (item.sequence for item in plan):
            if not sequence.counted:
                sequence.counted = True
                if sequence.request.held:
                    continue
                self._counters["prefix_query_tokens"] += len(sequence.tokens)
                self._counters["prefix_hit_tokens"] += sequence.num_cached
        if self._merging is not None:
            self._merging.took(plan)
        self._scheduler.advance(item for item in plan if self._goes_on(item.sequence))

    def _complete(self, step: StepUnderWay, plan: SequenceOf[Scheduled[Sequence]]) -> list[TokenOutput]:
        """Read a step's tokens before the step counts.

        Requests without deltas from a host compute again.
        """
        drawn = list(zip(step.sequences, *step.drawn.read(), strict=True))
        host = self.adapters.store.host
        spoilt = self.adapters.stop_host({} if host is None else host.failures())
        if computed := [item for item in plan if item.sequence.adapter not in spoilt]:
            self._account(computed)
        return [self._take(*gain) for gain in drawn if gain[0].adapter not in spoilt]

    def _run_apart(self, plan: SequenceOf[Scheduled[Sequence]], error: Exception) -> list[TokenOutput]:
        from .suspects import run_apart

        gains = self.catch_up()

        def complete(items: SequenceOf[Scheduled[Sequence]]) -> None:
            gains.extend(self._complete(self._launch(items), items))

        found = run_apart((i for i in plan if self._goes_on(i.sequence)), error, self._runner, complete)
        may_pass = not found.num_done and len(found.adapters) > 1
        for adapter, problem in found.adapters:
            if self.adapters.readiness(adapter) is Readiness.HOST_COMPUTABLE:
                self.adapters.stop_host({content_number(adapter.packed.content_hash): problem})
                continue
            self.adapters.failures.compute_failed(adapter, problem, may_pass=may_pass)
            self._failed.append(adapter)
        for sequence, problem in found.requests:
            gains.append(self._finish(sequence, f"this request could not be computed: {problem}"))
        return gains + self._end_failed()

    def _note_load(self, adapter: AdapterVersion, error: Exception | None) -> None:
        if self._notes is not None:
            self._notes.end_load(adapter.name)
        if adapter.uid not in self.adapters.versions:
            return
        if error is None:
            self.adapters.failures.loaded(adapter)
        elif self.adapters.failures.load_failed(adapter, error):
            self._failed.append(adapter)
        if isinstance(error, PASSING) and adapter.pinned and adapter not in self.adapters.to_bring:
            self.adapters.to_bring.append(adapter)

    def _hear_failures(self) -> None:
        """Record other processes' reports of failed adapters."""
        reports = self.adapters.failures.reports
        while not reports.empty():
            content_hash, error = reports.get()
            for adapter in self.adapters.versions.values():
                if adapter.packed.content_hash == content_hash:
                    self.adapters.failures.load_failed(adapter, error, may_repeat=False)
                    self._failed.append(adapter)

    def _end_failed(self) -> list[TokenOutput]:
        failed, self._failed = self._failed, []
        problems: dict[AdapterVersion | None, str] = {}
        for adapter in failed:
            if self.adapters.failures.problem(adapter) is not None:  # else unloaded meanwhile
                problems[adapter] = self.adapters.failures.message(adapter)
        ending = [one for one in self._sequences.values() if one.adapter in problems]
        return [self._finish(one, problems[one.adapter]) for one in ending]

    def _finish(self, sequence: Sequence, problem: str) -> TokenOutput:
        self._scheduler.finish(sequence)
        return self._end(sequence, "error", problem)

    def _launch(self, plan: SequenceOf[Scheduled[Sequence]]) -> StepUnderWay:
        if self._notes is not None:
            self._notes.step({i.sequence.adapter.name for i in plan if i.sequence.adapter is not None})
        before = self._under_way
        logits = self._runner.run(plan, None if before is None else before.drawn.tokens)
        sampling = [item.sequence for item in plan if item.samples]
        return StepUnderWay(sampling, self.sampler.draw(logits, sampling))

    def catch_up(self) -> list[TokenOutput]:
        """Complete the running step, if any: no sequence expects a token afterwards."""
        step, self._under_way = self._under_way, None
        if step is None:
            return []
        gains = zip(step.sequences, *step.drawn.read(), strict=True)
        return [self._take(*gain) for gain in gains if self._goes_on(gain[0])]

    def _goes_on(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request.request_id) is sequence

    def _schedule(self) -> list[Scheduled[Sequence]]:
        scheduler, only = self._scheduler, None
        if self._merging is not None:
            requests = [*scheduler.running, *scheduler.loading, *scheduler.waiting]
            only = self._merging.decide(requests, held_back=scheduler.held_back)
        plan = scheduler.schedule(only)
        self.transfers.send()
        while self.transfers.blocking and not self._failed and self.transfers.wait_for_adapters():
            plan = scheduler.schedule(only)
            self.transfers.send()
        return plan

    def tend(self) -> float | None:
        """Confirm copies and start others.

        Returns the seconds until the next call; None: at the next event.
        """
        self.transfers.settle()
        if not self.adapters.failures.reports.empty():
            self._hear_failures()
        retry_s = self.adapters.bring_pinned() if self.adapters.to_bring else None
        if self._moves is not None:
            retry_s = self._moves.tend() or retry_s
        if not self._sequences:
            if self._notes is not None:
                self._notes.step(set())
            if self._merging is not None:
                self._merging.tend()
        wait_s = self.transfers.tick(len(self._scheduler.running))
        if retry_s is None or wait_s is None:
            return wait_s if retry_s is None else retry_s
        return min(retry_s, wait_s)

    def _refuse_impossible(self) -> list[TokenOutput]:
        sequence = self._scheduler.oldest
        waits = sequence in self._scheduler.waiting and self.adapters.waits_for_others
        held = any(one.held for one in self._sequences.values())
        if sequence is None or waits or held or self.transfers.busy:
            self._num_empty = 0
            return []
        self.stalled = False
        self._num_empty += 1
        if self._num_empty < NUM_TRIES:
            if self._merging is not None and self._num_empty == NUM_TRIES - 1:
                self._merging.give_up()
            return []
        self._num_empty = 0
        problem = (
            "there is no room in the arena for this request, and nothing that could leave it; unpin adapters "
            "or raise arena_mb"
        )
        return [self._finish(sequence, problem)]

    def _end(self, sequence: Sequence, reason: FinishReason, problem: str | None = None) -> TokenOutput:
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        timing = sequence.timing(self._clock.now_s())
        return TokenOutput(
            request_id=request_id,
            token_ids=(),
            finish_reason=reason,
            error=problem,
            timing=timing,
            adapter_version=None if sequence.adapter is None else sequence.adapter.version,
        )

    def add_request(self, request: GenerateRequest, arrival_s: float | None = None) -> None:
        """Queue a request.  arrival_s: None: now.

        Raises ValueError, AdapterNotFoundError, AdapterFailedError, or AdapterVersionError for another
        version or content.
        """
        check_request(request, self.info)
        if request.request_id in self._sequences:
            raise ValueError(f"request_id {request.request_id!r} is already running")
        adapter = None if request.adapter is None else self.adapters.usable(request.adapter)
        if adapter is not None and request.adapter_version not in (None, adapter.version):
            raise AdapterVersionError(
                f"the answer was begun with version {request.adapter_version} of adapter {adapter.name!r}, "
                f"and version {adapter.version} is served here; send the request again"
            )
        if adapter is not None and request.adapter_content not in (None, adapter.packed.content_hash):
            raise AdapterVersionError(
                f"the answer was begun with other content of adapter {adapter.name!r} than is served here; "
                "send the request again"
            )
        arrival_s = self._clock.now_s() if arrival_s is None else arrival_s
        sequence = self.sampler.sequence(request, adapter, arrival_s)
        sampling = request.sampling
        has_report = sampling.hidden_state or sampling.prompt_logprobs is not None
        if sampling.routed_experts:
            self._runner.report_experts(sequence)
        elif (has_report or sampling.prompt_logprob_token_ids) and not request.generated:
            self._runner.report_prompt(sequence)
        moves = self.moves if request.held or request.awaits_kv or request.prefill_only else None
        if moves is not None:
            moves.watch(sequence)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> TokenOutput | None:
        """Drop a request; returns the last output, if any."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._scheduler.finish(sequence)
        last = self._end(sequence, "abort")
        if not self._sequences:
            self._under_way = None
        return last

    def read_adapter(self, name: str, path: str, content_hash: str | None = None) -> PackedAdapter:
        """Read an adapter's files, in any thread."""
        with nullcontext() if self._notes is None else self._notes.load(name):
            packed = self.adapters.contents.read(name, path, content_hash)
            try:
                return self.adapters.store.prepare(packed)
            except MoeLoraError:
                self.adapters.contents.discard(packed.content_hash)
                raise

    def pack_adapter(self, name: str, tensors: Mapping[str, torch.Tensor], config: Any) -> PackedAdapter:
        """As `read_adapter`, from tensors in memory."""
        return self.adapters.store.prepare(self.adapters.contents.pack(name, tensors, config))

    def add_adapters(
        self, adapters: Iterable[tuple[PackedAdapter, str]], *, leave_out_bad: bool
    ) -> list[tuple[PackedAdapter, str]]:
        """Serve the start's adapters; returns those with room.

        Raises CapacityError for others, unless leave_out_bad.
        """
        added = []
        for packed, path in adapters:
            try:
                self.add_adapter(packed, path)
            except CapacityError as error:
                if not leave_out_bad:
                    raise
                logger.error("adapter %s is left out: %s", packed.name, error)
            else:
                added.append((packed, path))
        return added

    def add_adapter(
        self, packed: PackedAdapter, path: str | None, *, replace: bool = False, version: int | None = None
    ) -> AdapterInfo:
        """Serve an adapter from now on, also in requests that switch."""
        self._hear_failures()
        adapter = self.adapters.add(packed, path, replace=replace, version=version)
        switching = [
            one
            for one in self._sequences.values()
            if one.request.adapter == adapter.name and one.request.sampling.on_publish == "switch"
        ]
        if switching:
            from .switching import switch

            switch(switching, adapter, self._scheduler, self.adapters)
        self.transfers.send()
        logger.info(
            "adapter %s version %d: rank %d, %d bytes",
            adapter.name,
            adapter.version,
            packed.max_lora_rank,
            packed.nbytes,
        )
        return self.adapters.info(adapter)

    def remove_adapter(self, name: str) -> frozenset[int]:
        """Refuse new requests for an adapter; returns uids of versions in use."""
        self.adapters.remove(name)
        self.transfers.send()
        logger.info("adapter %s removed", name)
        return frozenset(a.uid for a in self.adapters.versions.values() if a.name == name)

    def adapters_in_use(self, uids: frozenset[int]) -> bool:
        """True while a request of these versions runs."""
        return not uids.isdisjoint(self.adapters.versions)

    def known_adapter(self, name: str) -> tuple[AdapterInfo, PackedAdapter]:
        """The adapter's version for new requests, and its kept form.  Raises AdapterNotFoundError."""
        adapter = self.adapters.current(name)
        return self.adapters.info(adapter), adapter.packed

    def stats(self) -> EngineStats:
        def names(sequences: list[Sequence]) -> tuple[str, ...]:
            return tuple(sorted({s.adapter.name for s in sequences if s.adapter is not None}))

        background = self._scheduler.background
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_deferred=self._scheduler.num_deferred,
            num_background=0 if background is None else background.num_queued,
            running_adapters=names(self._scheduler.running),
            waiting_adapters=names([*self._scheduler.loading, *self._scheduler.waiting]),
            resident_adapters=tuple(sorted({a.name for a in self.adapters.resident()})),
            num_preemptions=self._scheduler.num_preemptions,
            num_put_back=self._scheduler.num_put_back,
            adapter_hits=self._scheduler.num_adapter_hits,
            adapter_misses=self._scheduler.num_adapter_misses,
            adapters_preloaded=self.adapters.num_preloaded,
            **self._runner.lora_rows(),
            **self.adapters.store.counters(),
            **self.transfers.figures(self.adapters.page_bytes, self.info.num_kv_blocks),
            step_counts=tuple(self._step_counts),
            **self._counters,
            **({} if self._merging is None else self._merging.figures()),
        )

    def _take_only(self, sequence: Sequence, token: int) -> TokenOutput:
        """Take a token without an alternative."""
        self._counters["step_tokens"] += 1
        self._scheduler.charge(sequence)
        return self._take(sequence, token, None)

    def _take(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        now_s = self._clock.now_s()
        reason = sequence.append(token, now_s, self.info.eos_token_ids)
        self._counters["generation_tokens"] += 1
        if sequence.num_generated == 1:  # once per answer, also after a move
            self._counters["prompt_tokens"] += len(sequence.request.prompt_token_ids)
        prompt = None if sequence.record is None else sequence.record.report(sequence)
        request_id = sequence.request.request_id
        if reason is not None:
            self._scheduler.finish(sequence)
            del self._sequences[request_id]
        return TokenOutput(
            request_id=request_id,
            token_ids=(token,),
            logprobs=None if logprobs is None else (logprobs,),
            finish_reason=reason,
            error=sequence.problem,
            num_cached_tokens=sequence.num_cached,
            timing=sequence.timing(now_s) if reason is not None else None,
            adapter_version=None if sequence.adapter is None else sequence.adapter.version,
            prompt=prompt,
        )
