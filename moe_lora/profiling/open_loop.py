"""Requests sent to an engine of this process at their times, whether earlier ones are done or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.workload.replay_plan import PlannedRequest

from moe_lora.engine.core import EngineCore

_LONGEST_SLEEP_S = 0.01


@dataclass(slots=True)
class OpenRequest:
    """A request on its way; seconds after the run's start, NaN: not yet."""

    arrival_s: float
    output_tokens: int
    first_token_s: float = math.nan
    finish_s: float = math.nan


class OverloadError(Exception):
    """A request waited for its first token for too long; waited_s says how long."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"a request waited {waited_s:.3g} s for its first token")
        self.waited_s = waited_s


def serve_open_loop(
    core: EngineCore,
    plan: Sequence[PlannedRequest],
    *,
    longest_wait_s: float,
    now_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[OpenRequest]:
    """Serve the plan with an engine that has no other work; every answer has its full length.

    plan: by arrival.  Prompts are different from each other.  TTFT counts from the planned arrival, so a step
    that holds up an arrival counts.  Raises OverloadError, with every request dropped, as soon as one waits
    longer than longest_wait_s for its first token.
    """
    start_s = now_s()
    requests = [OpenRequest(planned.arrival_s, planned.output_tokens) for planned in plan]
    waiting: dict[str, OpenRequest] = {}
    running: dict[str, OpenRequest] = {}
    num_sent = 0
    try:
        while num_sent < len(plan) or running:
            elapsed_s = now_s() - start_s
            while num_sent < len(plan) and plan[num_sent].arrival_s <= elapsed_s:
                request_id = f"open-{num_sent}"
                core.add_request(_request(core, request_id, plan[num_sent]))
                waiting[request_id] = running[request_id] = requests[num_sent]
                num_sent += 1
            if not running:
                sleep(min(_LONGEST_SLEEP_S, max(0.0, plan[num_sent].arrival_s - elapsed_s)))
                continue
            _step(core, waiting, running, lambda: now_s() - start_s)
            oldest = next(iter(waiting.values()), None)
            waited_s = 0.0 if oldest is None else now_s() - start_s - oldest.arrival_s
            if waited_s > longest_wait_s:
                raise OverloadError(waited_s)
    finally:
        for request_id in running:
            core.abort(request_id)
    return requests


def _step(
    core: EngineCore,
    waiting: dict[str, OpenRequest],
    running: dict[str, OpenRequest],
    elapsed_s: Callable[[], float],
) -> None:
    """One step; stamps first tokens and ends, and forgets requests that are done."""
    outputs = core.step()
    end_s = elapsed_s()
    for output in outputs:
        if output.request_id in waiting:
            waiting.pop(output.request_id).first_token_s = end_s
        if output.finish_reason is not None:
            running.pop(output.request_id).finish_s = end_s


def _request(core: EngineCore, request_id: str, planned: PlannedRequest) -> GenerateRequest:
    vocab = core.info.vocab_size
    first = 7919 * (planned.index + 1)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple((first + 31 * i) % vocab for i in range(planned.prompt_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=planned.output_tokens, ignore_eos=True),
        adapter=planned.adapter,
    )
