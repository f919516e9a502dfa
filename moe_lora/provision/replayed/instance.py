# SPDX-License-Identifier: Apache-2.0
"""A simulated LLM instance: continuous batching, the real admission policy, modelled step times.

Equal steps form one event, a `Stretch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from moe_lora.core.errors import CapacityError
from moe_lora.policies.admission.admission import admissible
from moe_lora.policies.routing.routing import InstanceLoad
from moe_lora.sim.events import EventQueue
from moe_lora.timing.layer_stages import decode_layer_s

from .running import RunningRequests, SimRequest, WaitingRequests
from .sources import AdapterSource
from .system_config import InstanceConfig


class StepTime:
    """Time of a step with decode rows, prompt tokens, or both.

    By a profile, by layer times, or by a model: a decode plus a prefill step.  remote: deltas on a LoRA
    Server.
    """

    def __init__(self, config: InstanceConfig, *, remote: bool) -> None:
        self._config = config
        self._remote = remote

    def layer_s(self, running: RunningRequests) -> tuple[float, float]:
        """Seconds of a layer, and of the deltas.  Only layer times include prompts."""
        if self._config.layers is not None:
            return self._config.layers.layer_s(running)
        profile = self._config.profile
        if profile is None:
            assert self._config.steps is not None
            assert running.decode is not None
            return self._config.steps.seconds("decode", running.decode), 0.0
        adapters = running.num_with_adapter > 0
        return decode_layer_s(profile, running.num_rows, adapters=adapters, remote=self._remote)

    def prompts_s(self, running: RunningRequests) -> float:
        """Extra time of the prompt tokens."""
        if self._config.steps is not None:
            return self._config.steps.prefill_step_s(running.prompts)
        prefill = self._config.prefill
        return 0.0 if prefill is None else prefill.seconds(running.num_prompt_tokens)

    def step_s(self, layer_s: float, server_s: float = 0.0) -> float:
        """A step with layers of layer_s.  server_s, for all instances, is a lower limit of a layer's time."""
        return self._config.num_layers * max(layer_s, server_s)


def delayed_step_s(step_s: float, num_layers: int, first_layer_s: float, last_layer_s: float) -> float:
    """A step that waits for adapter loads.

    first_layer_s, last_layer_s: load times from the step's start; layers between come evenly.
    """
    after_last_s = step_s / num_layers
    return max(step_s, first_layer_s + step_s, last_layer_s + after_last_s)


@dataclass(slots=True, eq=False)
class Stretch:
    """num_steps steps from start_s on: the first takes first_s, the rest step_s each.

    Zero steps: the moment before a step, after all events of start_s.
    """

    start_s: float
    first_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0

    @property
    def end_s(self) -> float:
        if self.num_steps == 0:
            return self.start_s
        return self.start_s + self.first_s + (self.num_steps - 1) * self.step_s

    def steps_done(self, now_s: float) -> int:
        over_s = now_s - self.start_s - self.first_s
        if over_s < 0:
            return 0
        if self.step_s == 0:
            return self.num_steps
        return min(self.num_steps, 1 + math.floor(over_s / self.step_s))

    def cut(self, now_s: float) -> bool:
        """End with the current step; False if already the end."""
        if self.num_steps < 2 or self.step_s == 0:
            return False
        over_s = now_s - self.start_s - self.first_s
        begun = 1 + max(0, math.ceil(over_s / self.step_s))
        if self.start_s + self.first_s + (begun - 1) * self.step_s < now_s:
            begun += 1
        if begun >= self.num_steps:
            return False
        self.num_steps = begun
        return True


class SimInstance:
    """`InstanceView`; needs `connect` before the first request."""

    def __init__(
        self,
        index: int,
        config: InstanceConfig,
        step_time: StepTime,
        events: EventQueue,
        on_finish: Callable[[SimRequest], None],
    ) -> None:
        self.index = index
        self._config = config
        self._step_time = step_time
        self._events = events
        self._on_finish = on_finish
        self._waiting = WaitingRequests(shortest_first=config.shortest_first)
        budget = config.max_num_batched_tokens if config.has_prompts else None
        self._running = RunningRequests(budget, config.steps)
        self._prefix_hits = None if config.prefix_hits is None else config.prefix_hits()
        self._free_kv_tokens = math.inf if config.kv_tokens is None else config.kv_tokens
        self._stretch: Stretch | None = None
        self._outstanding_tokens = 0
        self.load = InstanceLoad()
        self.on_first_token: Callable[[SimRequest], None] | None = None
        self.on_prompt_step: Callable[[SimRequest], None] | None = None
        self._received: dict[int, Callable[[SimRequest, bool], None]] = {}
        self._leaving: dict[SimRequest, Callable[[], None]] = {}

    def connect(self, source: AdapterSource) -> None:
        self._source = source

    @property
    def num_steps(self) -> int:
        return self._running.num_steps

    @property
    def outstanding_tokens(self) -> int:
        done = self._stretch.steps_done(self._events.now_s()) if self._stretch else 0
        return self._outstanding_tokens - done * self._running.num_rows

    @property
    def has_spare_seat(self) -> bool:
        """As `CachedInstance`."""
        return len(self._running) + len(self._waiting) + 1 < max(2, self._config.max_num_seqs)

    def add(self, request: SimRequest) -> None:
        """Queue a request.  Raises CapacityError for a too large request."""
        room = self._config.kv_tokens
        if room is not None and request.num_tokens > room:
            raise CapacityError(
                f"request {request.index} needs {request.num_tokens} tokens of KV, an instance has {room:g}; "
                "raise kv_tokens or shorten the request"
            )
        request.instance = self.index
        self._outstanding_tokens += self._running.work(request)
        self.load.add(request.adapter, request.prompt_tokens)
        self._source.wait(request)
        self._waiting.add(request)
        self.look_again()

    def receive(self, request: SimRequest, on_ready: Callable[[SimRequest, bool], None]) -> SimRequest:
        """As `CachedInstance`, like the next five."""
        moved = replace(request) if request.num_answered else request  # the source of an answer decodes on
        moved.num_answered, self._received[request.index] = 1, on_ready
        self.add(moved)
        return moved

    def remove(self, request: SimRequest, *, is_ready: bool = False) -> bool:
        waits = self._waiting.remove(request)
        if not waits and not is_ready:
            return False
        self._outstanding_tokens -= self._running.work(request)
        if waits:
            del self._received[request.index]
            self.load.end(request.adapter, request.prompt_tokens, started=False)
            self._source.end_wait(request)
        else:
            self.load.start(request.adapter, request.prompt_tokens)
            self._leave(request)
        return True

    def start_received(self, request: SimRequest, num_kv: int, source: SimRequest) -> None:
        self._outstanding_tokens -= source.num_computed
        self.load.start(request.adapter, request.prompt_tokens)
        source.instance = self.index
        self._join(source)

    def resume(self, request: SimRequest) -> None:
        self._free_kv_tokens -= request.output_tokens - 1
        request.instance, request.num_answered = self.index, 1
        self._join(request)

    def release(self, request: SimRequest) -> None:
        self._outstanding_tokens -= request.output_tokens - request.num_answered
        self._leave(request)

    def hold(self, request: SimRequest, on_held: Callable[[], None]) -> None:
        self._leaving[request] = on_held
        self.look_again()

    def _leave(self, request: SimRequest) -> None:
        self._running.num_seats -= 1
        is_resumed = request.instance == self.index
        self._free(request, request.num_tokens if is_resumed else self._kv_tokens(request))
        self.look_again()

    def freed(self) -> None:
        """Refused requests may find room now."""
        self._waiting.freed()
        self.look_again()

    def look_again(self) -> None:
        """Start a step, or plan again after the last."""
        now_s = self._events.now_s()
        if self._stretch is None:
            self._go_on(Stretch(now_s))
        elif self._stretch.cut(now_s):
            self._go_on(self._stretch)

    def _go_on(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._events.at(stretch.end_s, partial(self._end, stretch, stretch.end_s))

    def _end(self, stretch: Stretch, end_s: float) -> None:
        if stretch is not self._stretch or end_s != stretch.end_s:
            return
        running = self._running
        self._stretch = None
        if stretch.num_steps:
            self._outstanding_tokens -= stretch.num_steps * running.num_rows + running.num_prompt_tokens
            held: list[SimRequest] | None = None if self.on_first_token is None else []
            for request in running.advance(stretch.num_steps, end_s, held):
                self._finish(request)
            for request in held or ():
                assert self.on_first_token is not None
                self.on_first_token(request)
            for request in running.unfinished_prompts if self.on_prompt_step is not None else ():
                assert self.on_prompt_step is not None
                self.on_prompt_step(request)
        self._begin(end_s)

    def _begin(self, now_s: float) -> None:
        running = self._running
        running.continue_prompts()
        self._waiting.next_step()
        started = running.join(now_s)
        for request in started:
            self._start(request, now_s)
        leaving, self._leaving = self._leaving, {}
        for request, on_held in leaving.items():
            if running.hold(request):
                on_held()
        started += self._admit(now_s)
        if running.is_idle:
            self._source.work(0.0, 0.0)
            if running.next_join_s is not None:
                self._go_on(Stretch(running.next_join_s))
            return
        layer_s, delta_s = self._step_time.layer_s(running)
        step_s = self._step_time.step_s(layer_s, self._source.work(layer_s, delta_s))
        first_s = self._first_step_s(step_s, started, now_s)
        running.stamp_first_decode(now_s + first_s)
        self._go_on(Stretch(now_s, first_s, step_s, running.steps_alike()))

    def _first_step_s(self, step_s: float, started: list[SimRequest], now_s: float) -> float:
        step_s += self._step_time.prompts_s(self._running)
        loaded_s = self._source.loaded_s(started)
        if loaded_s is None:
            return step_s
        first_layer_s, last_layer_s = (moment_s - now_s for moment_s in loaded_s)
        return delayed_step_s(step_s, self._config.num_layers, first_layer_s, last_layer_s)

    def _admit(self, now_s: float) -> list[SimRequest]:
        admitted: list[SimRequest] = []
        started: list[SimRequest] = []
        self.load.held_back = False
        if not self._waiting or not self._has_room:
            return started
        whole = True
        turned_away: set[str | None] = set()

        def acquire(request: SimRequest) -> bool:
            found = self._source.acquire(request)
            if not found:
                turned_away.add(request.adapter)
            return found

        queue = self._waiting.candidates()
        for request in admissible(queue, acquire, now_s, self._source.starvation_s):
            if self._kv_tokens(request) > self._free_kv_tokens:
                self._source.wait(request)
                self._source.release(request)
                whole = False
                break
            admitted.append(request)
            if self._take(request, now_s):
                started.append(request)
            whole = self._has_room
            if not whole:
                break
        self._waiting.scanned(admitted, turned_away, whole=whole)
        self.load.held_back = whole and len(self._waiting) > 0
        return started

    @property
    def _has_room(self) -> bool:
        return len(self._running) < self._config.max_num_seqs and self._running.has_room

    def _take(self, request: SimRequest, now_s: float) -> bool:
        self._free_kv_tokens -= self._kv_tokens(request)
        if request.num_answered:
            self._running.num_seats += 1
            self._call_ready(request, now_s)
            return False
        if self._prefix_hits is not None:
            request.num_cached = self._prefix_hits.match(request)
            self._outstanding_tokens -= request.num_cached
        adapter = self._source.adapter(request)
        if adapter is not None and adapter.told_s > now_s:
            self._running.join_at(adapter.told_s, request)
            return False
        self._start(request, now_s)
        return True

    def _kv_tokens(self, request: SimRequest) -> int:
        """To reserve: an answer computed elsewhere needs none."""
        return request.num_tokens if self.on_first_token is None else request.prompt_tokens + 1

    def _join(self, request: SimRequest) -> None:
        """Decode from the next step on."""
        self._running.num_seats -= 1
        self._running.join_at(self._events.now_s(), request)
        self.look_again()

    def _call_ready(self, request: SimRequest, now_s: float) -> None:
        """Call on_ready with the adapter's last byte, or its lease: steps wait for layers."""
        adapter, ready_s = self._source.adapter(request), now_s
        if adapter is not None:
            ready_s = max(now_s, adapter.told_s, adapter.last_layer_s if self._source.loads_first else now_s)
        on_ready = self._received.pop(request.index)
        self._events.at(ready_s, partial(on_ready, request, True))

    def _start(self, request: SimRequest, now_s: float) -> None:
        if request.num_answered:
            self._running.start(request)
            return
        request.admitted_s = now_s
        adapter = self._source.adapter(request)
        if adapter is not None and self._source.loads_first:
            request.admitted_s = max(now_s, adapter.first_layer_s)
        self.load.start(request.adapter, request.prompt_tokens)
        self._running.start(request)

    def _finish(self, request: SimRequest) -> None:
        self._free(request, request.num_tokens)
        self._on_finish(request)

    def _free(self, request: SimRequest, kv_tokens: int) -> None:
        self._free_kv_tokens += kv_tokens
        if self._prefix_hits is not None:
            self._prefix_hits.add(request, self._free_kv_tokens)
        self.load.end(request.adapter, request.prompt_tokens, started=True)
        if self._source.release(request):
            self._waiting.freed()
