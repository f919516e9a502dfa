# SPDX-License-Identifier: Apache-2.0
"""Coupled instances: adapters beside weights and KV; prompts with answers, or apart."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

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
        inputs, cluster = self._inputs, self._cluster
        if inputs.prompts is None or inputs.rate_per_s is None:
            return 0.0
        rate_per_s = inputs.rate_per_s * (1 + cluster.margin) / num_instances
        return rate_per_s * inputs.prompts.computed_tokens * cluster.token_s(None)

    def prompts_share(self, num_instances: int) -> float:
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
        """Loads of one instance."""
        inputs = self._inputs
        load_s = self.load_s(place.slots)
        misses = miss_share(inputs.probabilities, place.slots) if load_s else 0.0
        requests_per_s = batch / (inputs.output_tokens * tpot_s)
        return LoadQueue(
            loads_per_s=requests_per_s * inputs.adapter_share * misses, load_s=load_s, misses=misses
        )

    def p95_decode_ttft_s(self, tpot_s: float, queue: LoadQueue) -> float:
        """P95 TTFT without the prompt, and without a wait for a slot."""
        return (queue.load_s if queue.misses > 0.05 else 0.0) + STEPS_TO_FIRST_TOKEN * tpot_s

    def p95_ttft_s(self, place: SizedCluster, tpot_s: float, queue: LoadQueue) -> float:
        """P95 TTFT without a wait for a slot or for further prompts."""
        return self.p95_decode_ttft_s(tpot_s, queue) + self._cluster.prefill_s(None, tpot_s)

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
FURTHER = 2
"""Tried instances for prompts above the fewest."""


class Apart(Coupled):
    """As `Coupled`, with instances for prompts; the others are sized without prompts.

    Raises MissingRateError without a rate for KV.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(Cluster(replace(cluster.inputs, prompts=None)))
        assert cluster.inputs.prompts is not None
        self.together, self.needed, self.prompts = cluster, cluster.needed, cluster.inputs.prompts
        self._net_bytes_per_s = self._inputs.profile.gpu.needed("net_bytes_per_s", self._inputs.profile.name)

    def prefill(self, place: SizedCluster) -> PrefillConfig | None:
        if not place.prefill_instances:
            return None
        return PrefillConfig(
            num_instances=place.prefill_instances,
            kv_token_bytes=self._inputs.kv_token_bytes,
            link_bytes_per_s=self._net_bytes_per_s,
        )

    @cached_property
    def full_step(self) -> int:
        """Prompt tokens of a step, within NEAR of the fastest."""
        unit, token_s = LEAST_STEP_TOKENS, self.together.token_s
        fast_s = NEAR * token_s(None, MOST_STEP_TOKENS)
        return unit + unit * largest(lambda n: token_s(None, n * unit) > fast_s, MOST_STEP_TOKENS // unit, 0)

    def step_tokens(self, place: SizedCluster) -> int:
        return max(self.full_step, self.most_rows(place))

    def prompts_share(self, num_instances: int) -> float:
        """The load's prompts, over the time of num_instances in full steps."""
        inputs, prompts = self._inputs, self.prompts
        assert inputs.rate_per_s is not None
        rate_per_s = inputs.rate_per_s * (1 + self.together.margin) / num_instances
        return rate_per_s * prompts.computed_tokens * self.together.token_s(None, self.full_step)

    @property
    def move_s(self) -> float:
        """Transfer of a mean prompt's KV."""
        num_bytes = self.prompts.prompt_tokens * self._inputs.kv_token_bytes
        return LinkTime(self._net_bytes_per_s).seconds(num_bytes)

    def places(self, num_instances: int) -> list[SizedCluster]:
        """Numbers of instances for prompts; first 0: each instance has full steps."""
        fewest = math.ceil(self.prompts_share(1) / MOST_PROMPTS)
        undivided = [0] if fewest <= num_instances else []
        least = self.prompts.longest_kv_tokens / self._inputs.context_tokens
        found = []
        for number in (*undivided, *range(fewest, fewest + 1 + FURTHER)):
            decoding = super().places(num_instances - number)[:1] if number < num_instances else []
            found += [
                replace(place, num_instances=num_instances, prefill_instances=number, full_steps=True)
                for place in decoding
                if self.kv_requests(place.slots) >= least
            ]
        return found

    def nearness(self, place: SizedCluster) -> float:
        share = self.prompts_share(place.prefill_instances or place.num_instances)
        return max(super().nearness(place), share / MOST_PROMPTS)

    def p95_ttft_s(self, place: SizedCluster, tpot_s: float, queue: LoadQueue) -> float:
        """Load, the step under way, and the prompt."""
        tokens = self.full_step + self.prompts.p95_computed
        load_s = self.p95_decode_ttft_s(0.0, queue)
        return load_s + tokens * self.together.token_s(None, self.full_step)


def sizing_of(cluster: Cluster, place: SizedCluster) -> Coupled:
    """The models of a coupled place."""
    return Apart(cluster) if place.full_steps else Coupled(cluster)
