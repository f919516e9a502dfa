# SPDX-License-Identifier: Apache-2.0
"""Coupled instances: adapters beside weights and KV; prompts with answers, or apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count, takewhile

from moe_lora.provision.admission.admitted import largest
from moe_lora.provision.admission.iar import expected_active
from moe_lora.sim.prefill_first import PrefillConfig
from moe_lora.timing.host_times import LinkTime

from .cluster_size import LEAST_STEP_TOKENS, MOST_STEP_TOKENS, Cluster
from .inputs import SizedCluster
from .memory import STEPS_TO_FIRST_TOKEN, LoadQueue, miss_share
from .sizing import most_running
from .stages import StepTokens

SPLITS = (0.5, 1.0, 0.0)
"""Adapters' parts of the memory beyond M* and the mean KV, in order of trial."""

MOST_PROMPTS = 0.95
"""Share of an instance's time: above, queues grow beyond a replay."""


class Coupled:
    """Coupled clusters for the load of `cluster`; each instance has prompts and answers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._inputs = cluster, cluster.inputs
        self.needed = cluster.needed
        """M* of an instance's rows."""

    @property
    def cluster(self) -> Cluster:
        """With the times of steps with decode rows."""
        return self._cluster

    def prefill(self, place: SizedCluster) -> PrefillConfig | None:
        """For the simulators."""
        return None

    def step_tokens(self, place: SizedCluster) -> int:
        """Budget of a step."""
        return self._cluster.step_tokens(None, self.batch(place.num_decoding))

    def tpot_s(self, batch: float) -> float:
        """TPOT of a mean step with `batch` decode rows."""
        stages, rows = self._cluster.stages, max(self._cluster.least_rows, batch)
        return self._inputs.shape.num_layers * stages.coupled_layer_s(stages.prompts.step(rows))

    def batch(self, num_instances: int) -> float:
        """Planned rows (Little's law) with the margin; infinite above MOST_PROMPTS."""
        inputs, cluster = self._inputs, self._cluster
        if self.prompt_share(num_instances) > MOST_PROMPTS:
            return math.inf
        if inputs.global_batch is not None:
            return inputs.global_batch / num_instances
        key = None, num_instances
        if key not in cluster.alone:
            cluster.alone[key] = cluster.fixed_point(self.tpot_s, 0.0, num_instances)
        return cluster.alone[key] * (1 + cluster.margin)

    def prompt_share(self, num_instances: int) -> float:
        """The load's prompts, over an instance's time in full steps."""
        prompts = self._inputs.prompts
        if prompts is None:
            return 0.0
        rate_per_s = self.rate_per_s(num_instances) / num_instances
        return rate_per_s * prompts.computed_tokens * self._cluster.token_s(None)

    def rate_per_s(self, num_instances: int) -> float:
        """Planned requests per second: given, with the margin, or of the global batch."""
        inputs = self._inputs
        if inputs.global_batch is not None:
            step_s = self.tpot_s(inputs.global_batch / num_instances)
            return inputs.global_batch / (inputs.output_tokens * step_s)
        assert inputs.rate_per_s is not None
        return inputs.rate_per_s * (1 + self._cluster.margin)

    def prompts_share(self, num_instances: int, step_tokens: int = 0) -> float:
        """Of the time of instances with prompts."""
        return self.prompt_share(num_instances)

    def kv_requests(self, slots: int) -> float:
        """Requests whose KV fits beside `slots` adapters."""
        context = self._inputs.kv_token_bytes * self._inputs.context_tokens
        return (self._room - slots * self._inputs.coupled_adapter_bytes) / context

    def load_s(self, slots: int) -> float:
        """Load time of an adapter over all GPUs; 0 if every adapter has a slot.

        Raises MissingRateError without a rate.
        """
        inputs = self._inputs
        if slots >= len(inputs.probabilities):
            return 0.0
        rate = inputs.profile.gpu.needed("load_bytes_per_s", inputs.profile.name)
        return LinkTime(inputs.instance_gpus * rate).seconds(inputs.coupled_adapter_bytes)

    def places(self, num_instances: int) -> list[SizedCluster]:
        """Splits of an instance's memory between adapters and KV."""
        running = self.batch(num_instances) * self._cluster.in_service
        if math.isinf(running):
            return []
        token_bytes, prompts = self._inputs.kv_token_bytes, self._inputs.prompts
        longest = 0.0 if prompts is None else prompts.longest_kv_tokens
        tokens = max(longest, (running + 4 * math.sqrt(running)) * self._inputs.context_tokens)
        kv_bytes = tokens * token_bytes
        fitting = int((self._room - kv_bytes) / self._inputs.coupled_adapter_bytes)
        most = min(len(self._inputs.probabilities), fitting)
        loads = self._inputs.profile.gpu.load_bytes_per_s is not None
        if most < (1 if loads else len(self._inputs.probabilities)):
            return []
        least = min(most, self.needed(self.batch(num_instances)))
        slots = dict.fromkeys(least + round(part * (most - least)) for part in SPLITS)
        if most == len(self._inputs.probabilities):
            slots = {most: None} | (slots if loads else {})
        return [SizedCluster(None, num_instances, one) for one in slots]

    def nearness(self, place: SizedCluster) -> float:
        """Largest ratio of a prediction to its goal; infinite for an impossible place."""
        inputs, cluster = self._inputs, self._cluster
        batch = self.batch(place.num_decoding)
        if math.isinf(batch):
            return math.inf
        running, tpot_s = batch * cluster.in_service, self.tpot_s(batch)
        queue = self.queue(place, batch, tpot_s)
        return max(
            tpot_s / inputs.slo_tpot_s,
            self.p95_ttft_s(place, tpot_s, queue) / inputs.slo_ttft_s,
            running / self.kv_requests(place.slots),
            expected_active(inputs.probabilities, running * inputs.adapter_share) / place.slots
            if place.slots < len(inputs.probabilities)
            else 0.0,
            queue.utilisation,
        )

    def queue(self, place: SizedCluster, batch: float, tpot_s: float) -> LoadQueue:
        """Loads of one instance: of a division, on the side of fewer; each side loads for every request."""
        inputs, decoding = self._inputs, place.num_decoding
        load_s = self.load_s(place.slots)
        misses = miss_share(inputs.probabilities, place.slots) if load_s else 0.0
        requests_per_s = batch / (inputs.output_tokens * tpot_s)
        requests_per_s *= decoding / min(decoding, place.prefill_instances or decoding)
        return LoadQueue(
            loads_per_s=requests_per_s * inputs.adapter_share * misses, load_s=load_s, misses=misses
        )

    def p95_decode_ttft_s(self, tpot_s: float, queue: LoadQueue) -> float:
        """P95 TTFT without the prompt, and without a wait for a slot."""
        return (queue.load_s if queue.misses > 0.05 else 0.0) + STEPS_TO_FIRST_TOKEN * tpot_s

    def p95_ttft_s(self, place: SizedCluster, tpot_s: float, queue: LoadQueue) -> float:
        """P95 TTFT without a wait for a slot or for further prompts."""
        return self.p95_decode_ttft_s(tpot_s, queue) + self.prompt_s(place, tpot_s)

    def prompt_s(self, place: SizedCluster, tpot_s: float) -> float:
        """The P95 prompt's part of TTFT."""
        return self._cluster.prefill_s(None, tpot_s)

    def most_rows(self, place: SizedCluster) -> int:
        """Most requests of an instance within the TPOT SLO and KV."""
        cluster = self._cluster

        def in_time(rows: int) -> bool:
            return cluster.stages.coupled_layer_s(StepTokens(rows)) <= cluster.layer_budget_s

        kv = self.kv_requests(place.slots)
        return most_running(cluster, None, self.batch(place.num_decoding), in_time, kv)

    @cached_property
    def _room(self) -> float:
        inputs = self._inputs
        gpu = inputs.profile.gpu
        usable = inputs.instance_gpus * gpu.memory_bytes * gpu.instance_memory_share
        return usable - inputs.weight_bytes


NEAR = 1.05
"""Of the least time a prompt token: a step has the fewest tokens within this factor."""
FURTHER = 8
"""Instances for prompts: at most twice the fewest, and these."""
AT_ONCE = 4
"""Longest requests with KV on a prompt instance beside a LoRA Server."""


class LargerSteps(Coupled):
    """As `Coupled`, with steps beyond the TPOT SLO; replays judge the mean.  Sized without prompts."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(Cluster(replace(cluster.inputs, prompts=None)))
        assert cluster.inputs.prompts is not None
        self.together, self.needed, self.prompts = cluster, cluster.needed, cluster.inputs.prompts

    @cached_property
    def full_step(self) -> int:
        """Prompt tokens of a step, within NEAR of the fastest."""
        unit, token_s = LEAST_STEP_TOKENS, self.together.token_s
        fast_s = NEAR * token_s(None, MOST_STEP_TOKENS)
        return unit + unit * largest(lambda n: token_s(None, n * unit) > fast_s, MOST_STEP_TOKENS // unit, 0)

    def step_tokens(self, place: SizedCluster) -> int:
        return max(place.step_tokens, self.most_rows(place))

    def prompts_share(self, num_instances: int, step_tokens: int = 0) -> float:
        """The load's prompts, over the time of num_instances in steps of step_tokens (0: full_step)."""
        inputs, prompts = self._inputs, self.prompts
        assert inputs.rate_per_s is not None
        rate_per_s = inputs.rate_per_s * (1 + self.together.margin) / num_instances
        token_s = self.together.token_s(None, step_tokens or self.full_step)
        return rate_per_s * prompts.computed_tokens * token_s

    def places(self, num_instances: int) -> list[SizedCluster]:
        """Doublings of the largest step within the TPOT SLO, then full_step."""
        doubled = (self.together.step_tokens(None, 0.0) << number for number in count(1))
        steps = [*takewhile(lambda tokens: tokens < self.full_step, doubled), self.full_step]
        within = [one for one in steps if self.prompts_share(num_instances, one) <= MOST_PROMPTS]
        return self._places(num_instances, [(0, one) for one in within])

    def _places(self, num_instances: int, divisions: Sequence[tuple[int, int]]) -> list[SizedCluster]:
        """By instances for prompts and step; the longest request fits."""
        least = self.prompts.longest_kv_tokens / self._inputs.context_tokens
        return [
            replace(place, num_instances=num_instances, prefill_instances=prefill, step_tokens=tokens)
            for prefill, tokens in divisions
            for place in super(LargerSteps, self).places(num_instances - prefill)[:1]
            if self.kv_requests(place.slots) >= least
        ]

    def nearness(self, place: SizedCluster) -> float:
        share = self.prompts_share(place.prefill_instances or place.num_instances, place.step_tokens)
        return max(super().nearness(place), share / MOST_PROMPTS)

    def p95_ttft_s(self, place: SizedCluster, tpot_s: float, queue: LoadQueue) -> float:
        """Load, the step under way, and the prompt."""
        return self.p95_decode_ttft_s(0.0, queue) + self.prompt_s(place, tpot_s)

    def prompt_s(self, place: SizedCluster, tpot_s: float) -> float:
        tokens = place.step_tokens + self.prompts.p95_computed
        return tokens * self.together.token_s(None, place.step_tokens)


class Apart(LargerSteps):
    """Instances for prompts beside others.  Raises MissingRateError without a rate for KV."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._net_bytes_per_s = self._inputs.profile.gpu.needed("net_bytes_per_s", self._inputs.profile.name)

    def prefill(self, place: SizedCluster) -> PrefillConfig | None:
        return PrefillConfig(
            num_instances=place.prefill_instances,
            kv_token_bytes=self._inputs.kv_token_bytes,
            link_bytes_per_s=self._net_bytes_per_s,
        )

    @property
    def move_s(self) -> float:
        """Transfer of a mean prompt's KV."""
        num_bytes = self.prompts.prompt_tokens * self._inputs.kv_token_bytes
        return LinkTime(self._net_bytes_per_s).seconds(num_bytes)

    def link_share(self, num_decoding: int) -> float:
        """The load's KV, over the time of the receiving links."""
        assert self._inputs.rate_per_s is not None
        return self._inputs.rate_per_s * (1 + self.together.margin) * self.move_s / num_decoding

    def nearness(self, place: SizedCluster) -> float:
        return max(super().nearness(place), self.link_share(place.num_decoding))

    def places(self, num_instances: int) -> list[SizedCluster]:
        """Numbers of instances for prompts, from the fewest."""
        numbers = self.prompt_numbers(num_instances - 1)
        return self._places(num_instances, [(one, self.full_step) for one in numbers])

    def prompt_numbers(self, most: int) -> range:
        """Numbers of instances for prompts up to `most`."""
        fewest = math.ceil(self.prompts_share(1) / MOST_PROMPTS)
        return range(fewest, min(most, 2 * fewest + FURTHER) + 1)

    @cached_property
    def own_slots(self) -> int:
        """Adapters of a prompt instance beside a LoRA Server; 0: the KV of prompts leaves no room.

        Beside a step and AT_ONCE longest requests; with prefix hits, half of the room is further KV.
        """
        inputs = self._inputs
        kv_bytes = (self.full_step + AT_ONCE * self.prompts.longest_kv_tokens) * inputs.kv_token_bytes
        fitting = int((self._room - kv_bytes) / inputs.coupled_adapter_bytes)
        fitting = math.ceil(fitting / 2) if self.prompts.hit_share else fitting
        return max(0, min(len(inputs.probabilities), fitting))


def sizing_of(cluster: Cluster, place: SizedCluster) -> Coupled:
    """The models of a coupled place."""
    if place.prefill_instances:
        return Apart(cluster)
    return LargerSteps(cluster) if place.step_tokens else Coupled(cluster)
