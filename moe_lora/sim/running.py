"""The requests that an instance runs: whose prompt is computed, whose answer, when each ends."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from moe_lora.policies.step_model import StepModel
from moe_lora.policies.step_work import Row, StepWork

from .requests import SimRequest


@dataclass(slots=True)
class _Prompt:
    request: SimRequest
    num_left: int


class RunningRequests:
    """Decode rows, and prompts in the order in which they came.

    prefill_tokens: rows and prompt tokens of a step, at most; None: prompts are computed elsewhere, and every
    request begins as a decode row.  num_rows: decode rows of the next step.  steps: makes the batches below;
    None: nobody asks for them.
    """

    def __init__(self, prefill_tokens: int | None, steps: StepModel | None = None) -> None:
        self.num_rows = self.num_steps = self.num_with_adapter = 0
        self.num_prompt_tokens = 0
        """Of the next step."""
        self.decode: StepWork | None = None if steps is None else steps.work()
        """Decode rows of the next step."""
        self.prompts: list[Row] = []
        """Prompt tokens of the next step."""
        self._prefill_tokens = prefill_tokens
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._prompts: deque[_Prompt] = deque()
        self._fresh: list[SimRequest] = []
        self._joining: list[tuple[float, SimRequest]] = []

    def __len__(self) -> int:
        return self.num_rows + len(self._prompts) + len(self._joining)

    @property
    def is_idle(self) -> bool:
        """Whether the next step would have nothing to do."""
        return not self.num_rows and not self._prompts

    @property
    def next_join_s(self) -> float | None:
        """When the next one may join that may not yet."""
        return min((moment_s for moment_s, _ in self._joining), default=None)

    @property
    def has_room(self) -> bool:
        """Whether the next step may have another row or prompt token."""
        limit = self._prefill_tokens
        return limit is None or self.num_rows + self.num_prompt_tokens < limit

    def work(self, request: SimRequest) -> int:
        """Decode rows and prompt tokens that all its steps have together."""
        if self._prefill_tokens is None:
            return request.output_tokens
        return max(1, request.prompt_tokens) + request.output_tokens - 1

    def join_at(self, moment_s: float, request: SimRequest) -> None:
        """Start the request with the first step from then on."""
        self._joining.append((moment_s, request))

    def join(self, now_s: float) -> list[SimRequest]:
        """Those that may now; to be started."""
        joined = [request for moment_s, request in self._joining if moment_s <= now_s]
        if joined:
            self._joining = [later for later in self._joining if later[0] > now_s]
        return joined

    def start(self, request: SimRequest) -> None:
        """Compute the request from the next step on."""
        self.num_with_adapter += request.adapter_uid is not None
        if self._prefill_tokens is None:
            self._add_row(request, request.output_tokens)
        else:
            prompt = _Prompt(request, max(1, request.prompt_tokens))
            self._prompts.append(prompt)
            self._plan(prompt)

    def continue_prompts(self) -> None:
        """Plan the next step: tokens of prompts that are under way, the oldest first."""
        self.num_prompt_tokens = 0
        self.prompts.clear()
        for prompt in self._prompts:
            if not self.has_room:
                return
            self._plan(prompt)

    def steps_alike(self) -> int:
        """Steps until the batch changes by itself."""
        return 1 if self._prompts or self._joining else self._ends[0][0] - self.num_steps

    def stamp_first_decode(self, end_s: float) -> None:
        """The next step, the first decode step of some, ends then."""
        for request in self._fresh:
            if self._prefill_tokens is None:
                request.first_token_s = end_s
                request.decode_ttft_s = end_s - request.arrival_s
            else:
                waited_s = request.admitted_s - request.arrival_s
                request.decode_ttft_s = waited_s + end_s - request.first_token_s
        self._fresh.clear()

    def advance(self, num_steps: int, now_s: float) -> list[SimRequest]:
        """These steps have ended now; the requests that are done."""
        self.num_steps += num_steps
        done = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            done.append(heapq.heappop(self._ends)[2])
        self.num_rows -= len(done)
        if self.decode is not None:
            for request in done:
                self.decode.take(Row(request.adapter, request.lora_rank))
        while self._prompts and not self._prompts[0].num_left:
            request = self._prompts.popleft().request
            request.first_token_s = now_s
            if request.output_tokens > 1:
                self._add_row(request, request.output_tokens - 1)
            else:
                request.decode_ttft_s = request.admitted_s - request.arrival_s
                done.append(request)
        for request in done:
            request.finish_s = now_s
            self.num_with_adapter -= request.adapter_uid is not None
        return done

    def _add_row(self, request: SimRequest, num_steps: int) -> None:
        self.num_rows += 1
        if self.decode is not None:
            self.decode.add(Row(request.adapter, request.lora_rank))
        self._fresh.append(request)
        heapq.heappush(self._ends, (self.num_steps + num_steps, request.index, request))

    def _plan(self, prompt: _Prompt) -> None:
        assert self._prefill_tokens is not None
        num_tokens = min(prompt.num_left, self._prefill_tokens - self.num_rows - self.num_prompt_tokens)
        prompt.num_left -= num_tokens
        self.num_prompt_tokens += num_tokens
        self.prompts.append(Row(prompt.request.adapter, prompt.request.lora_rank, num_tokens))
