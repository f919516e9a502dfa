# SPDX-License-Identifier: Apache-2.0
"""An instance's requests: waiting, in prefill, decoding, finished."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from moe_lora.policies.admission.admission import shortest_first
from moe_lora.timing.step_model import Row, StepModel, StepWork


@dataclass(slots=True, eq=False)
class SimRequest:
    """A simulated request with timestamps (seconds; NaN: not yet)."""

    index: int
    arrival_s: float
    adapter: str | None
    """None: the base model."""
    prompt_tokens: int
    output_tokens: int
    lora_rank: int = 0
    instance: int = -1
    num_steps_before: int = 0
    prompt_left: int = 0
    """Prompt tokens not yet planned."""
    num_cached: int = 0
    """Prompt tokens with earlier KV."""
    hash_ids: tuple[int, ...] = ()
    at_once: bool = False
    """Starts with the first step after arrival."""
    waited_for_adapter: bool = False
    """No slot was free."""
    num_answered: int = 0
    """Answer tokens before a move."""
    admitted_s: float = math.nan
    """After the queue and any blocking load."""
    first_token_s: float = math.nan
    decode_ttft_s: float = math.nan
    """Queue, load and first decode step, without prefill (InfiniLoRA section 2.3, footnote)."""
    finish_s: float = math.nan

    @property
    def adapter_uid(self) -> str | None:
        """For admission: the adapter's name."""
        return self.adapter

    @property
    def num_left(self) -> int:
        """Output tokens to generate, if waiting."""
        return self.output_tokens

    @property
    def num_computed(self) -> int:
        """Tokens with KV, of a prompt between steps or of a held request."""
        return max(1, self.prompt_tokens) - self.prompt_left + max(0, self.num_answered - 1)

    @property
    def num_tokens(self) -> int:
        """KV tokens of prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """(finish - first token) / (output tokens - 1); NaN for a single token."""
        if self.output_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)


class RunningRequests:
    """Decode rows, and prompts in order of arrival.

    prefill_tokens: most rows and prompt tokens of a step; None: prompts are computed elsewhere, and requests
    start as decode rows.
    """

    def __init__(self, prefill_tokens: int | None, steps: StepModel | None = None) -> None:
        self.num_rows = self.num_steps = self.num_with_adapter = 0
        self.num_seats = 0
        """Of requests between two instances."""
        self.num_prompt_tokens = self.num_prompt_pairs = 0
        """Of the next step: see `system_config.StepRows`."""
        self.decode: StepWork | None = None if steps is None else steps.work()
        self.prompts: list[Row] = []
        self._prefill_tokens = prefill_tokens
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._prompts: deque[SimRequest] = deque()
        self._fresh: list[SimRequest] = []
        self._joining: list[tuple[float, SimRequest]] = []

    def __len__(self) -> int:
        return self.num_rows + len(self._prompts) + len(self._joining) + self.num_seats

    @property
    def num_prompts(self) -> int:
        """Prompts with tokens in the next step."""
        return len(self.prompts)

    @property
    def unfinished_prompts(self) -> list[SimRequest]:
        """Prompts of an answer that have further steps."""
        return [one for one in self._prompts if one.prompt_left and one.output_tokens > 1]

    @property
    def is_idle(self) -> bool:
        """True if the next step is empty."""
        return not self.num_rows and not self._prompts

    @property
    def next_join_s(self) -> float | None:
        """Earliest join time of a pending request."""
        return min((moment_s for moment_s, _ in self._joining), default=None)

    @property
    def has_room(self) -> bool:
        """True if the next step has room."""
        limit = self._prefill_tokens
        return limit is None or self.num_rows + self.num_prompt_tokens < limit

    def work(self, request: SimRequest) -> int:
        """Decode rows and prompt tokens of a request."""
        if self._prefill_tokens is None:
            return request.output_tokens
        return max(1, request.prompt_tokens) + request.output_tokens - 1

    def join_at(self, moment_s: float, request: SimRequest) -> None:
        """Start the request with the first step after moment_s."""
        self._joining.append((moment_s, request))

    def join(self, now_s: float) -> list[SimRequest]:
        """Requests with a join time up to now."""
        joined = [request for moment_s, request in self._joining if moment_s <= now_s]
        if joined:
            self._joining = [later for later in self._joining if later[0] > now_s]
        return joined

    def start(self, request: SimRequest) -> None:
        """Compute the request from the next step on."""
        self.num_with_adapter += request.adapter is not None
        if self._prefill_tokens is None or request.num_answered:
            self._add_row(request, request.output_tokens - request.num_answered)
        else:
            request.prompt_left = max(1, request.prompt_tokens - request.num_cached)
            self._prompts.append(request)
            self._plan(request)

    def continue_prompts(self) -> None:
        """Plan prompt tokens of the next step, oldest first."""
        self.num_prompt_tokens = self.num_prompt_pairs = 0
        self.prompts.clear()
        for request in self._prompts:
            if not self.has_room:
                return
            self._plan(request)

    def steps_alike(self) -> int:
        """Steps until the batch changes."""
        return 1 if self._prompts or self._joining else self._ends[0][0] - self.num_steps

    def stamp_first_decode(self, end_s: float) -> None:
        """Stamp the next step's end on requests with a first decode step."""
        for request in self._fresh:
            if self._prefill_tokens is None:
                request.first_token_s = end_s
                request.decode_ttft_s = end_s - request.arrival_s
            else:
                waited_s = request.admitted_s - request.arrival_s
                request.decode_ttft_s = waited_s + end_s - request.first_token_s
        self._fresh.clear()

    def advance(self, num_steps: int, now_s: float, held: list[SimRequest] | None = None) -> list[SimRequest]:
        """End num_steps steps now; returns finished requests.

        held: gets requests with a first token, which keep their seats; None: these decode here.
        """
        self.num_steps += num_steps
        done = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            done.append(heapq.heappop(self._ends)[2])
        self.num_rows -= len(done)
        if self.decode is not None:
            for request in done:
                self.decode.take(Row(request.adapter, request.lora_rank))
        while self._prompts and not self._prompts[0].prompt_left:
            request = self._prompts.popleft()
            request.first_token_s = now_s
            if held is not None and request.output_tokens > 1:
                held.append(request)
                self.num_seats += 1
                self.num_with_adapter -= request.adapter is not None
            elif request.output_tokens > 1:
                self._add_row(request, request.output_tokens - 1)
            else:
                request.decode_ttft_s = request.admitted_s - request.arrival_s
                done.append(request)
        for request in done:
            request.finish_s = now_s
            self.num_with_adapter -= request.adapter is not None
        return done

    def hold(self, request: SimRequest) -> bool:
        """Stop a decoding request, which keeps its seat; False if it has ended."""
        for entry in self._ends:
            if entry[2] is request:
                self._ends.remove(entry)
                heapq.heapify(self._ends)
                self._fresh = [one for one in self._fresh if one is not request]
                request.num_answered = request.output_tokens - (entry[0] - self.num_steps)
                self.num_rows -= 1
                self.num_seats += 1
                self.num_with_adapter -= request.adapter is not None
                if self.decode is not None:
                    self.decode.take(Row(request.adapter, request.lora_rank))
                return True
        return False

    def _add_row(self, request: SimRequest, num_steps: int) -> None:
        self.num_rows += 1
        if self.decode is not None:
            self.decode.add(Row(request.adapter, request.lora_rank))
        if math.isnan(request.decode_ttft_s):
            self._fresh.append(request)
        heapq.heappush(self._ends, (self.num_steps + num_steps, request.index, request))

    def _plan(self, request: SimRequest) -> None:
        assert self._prefill_tokens is not None
        num_tokens = min(request.prompt_left, self._prefill_tokens - self.num_rows - self.num_prompt_tokens)
        before = max(1, request.prompt_tokens) - request.prompt_left
        request.prompt_left -= num_tokens
        self.num_prompt_tokens += num_tokens
        self.num_prompt_pairs += num_tokens * before + num_tokens * (num_tokens + 1) // 2
        self.prompts.append(Row(request.adapter, request.lora_rank, num_tokens))


class WaitingRequests:
    """First come first served, or shortest first.

    After a whole scan without freed room, scans only the oldest (starvation) and newer requests: same
    decisions.
    """

    def __init__(self, *, shortest_first: bool) -> None:
        self._shortest_first = shortest_first
        self._refused: dict[int, SimRequest] = {}
        self._new: dict[int, SimRequest] = {}
        self._freed = False
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._refused) + len(self._new)

    def add(self, request: SimRequest) -> None:
        request.num_steps_before = self._num_steps
        self._new[request.index] = request

    def remove(self, request: SimRequest) -> bool:
        """Drop a request; False if not here."""
        found = self._new.pop(request.index, None) or self._refused.pop(request.index, None)
        return found is not None

    def freed(self) -> None:
        """Refused requests may find room now."""
        self._freed = True

    def next_step(self) -> None:
        """A step starts, with or without room."""
        self._num_steps += 1

    def candidates(self) -> Iterable[SimRequest]:
        """Requests to scan now; `scanned` follows."""
        if self._shortest_first:
            return shortest_first(chain(self._refused.values(), self._new.values()))
        if self._freed:
            return [*self._refused.values(), *self._new.values()]
        return [*islice(self._refused.values(), 1), *self._new.values()] if self._new else ()

    def scanned(
        self, started: Iterable[SimRequest], turned_away: Collection[str | None], *, whole: bool
    ) -> None:
        """Mark started candidates.

        whole: the rest lack only a slot.  turned_away: adapters without a slot.
        """
        for request in started:
            at_once = self._num_steps == request.num_steps_before + 1
            request.at_once = at_once and (request.at_once or not request.num_answered)
            if self._new.pop(request.index, None) is None:
                del self._refused[request.index]
        for request in self._new.values():
            request.waited_for_adapter |= whole or request.adapter in turned_away
        if turned_away:
            for request in self._refused.values():
                request.waited_for_adapter |= request.adapter in turned_away
        self._refused.update(self._new)
        self._new.clear()
        self._freed = not whole
