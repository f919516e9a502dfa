# SPDX-License-Identifier: Apache-2.0
"""Coupled instances: adapters beside weights and KV."""

from __future__ import annotations

import math
from functools import cached_property

from moe_lora.provision.admission.iar import expected_active
from moe_lora.timing.host_times import LinkTime

from .cluster_size import Cluster
from .inputs import SizedCluster
from .memory import STEPS_TO_FIRST_TOKEN, LoadQueue, miss_share
from .sizing import most_running
from .stages import StepTokens

SPLITS = (0.5, 1.0, 0.0)
"""Adapters' parts of the memory beyond M* and the mean KV, in order of trial."""

MOST_PROMPTS = 0.95
"""Share of an instance's time: above, queues grow beyond a replay."""


class Coupled:
    """Coupled clusters for the load of `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._inputs = cluster, cluster.inputs

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
        least = min(most, self._cluster.needed(self.batch(num_instances)))
        slots = dict.fromkeys(least + round(part * (most - least)) for part in SPLITS)
        if most == len(self._inputs.probabilities):
            slots = {most: None} | (slots if loads else {})
        return [SizedCluster(None, num_instances, one) for one in slots]

    def nearness(self, place: SizedCluster) -> float:
        """Largest ratio of a prediction to its goal; infinite for an impossible place."""
        inputs, cluster = self._inputs, self._cluster
        batch = self.batch(place.num_instances)
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

    def p95_ttft_s(self, place: SizedCluster, tpot_s: float, queue: LoadQueue) -> float:
        """P95 TTFT without a wait for a slot or for further prompts."""
        load_s = queue.load_s if queue.misses > 0.05 else 0.0
        return load_s + STEPS_TO_FIRST_TOKEN * tpot_s + self._cluster.prefill_s(None, tpot_s)

    def most_rows(self, place: SizedCluster) -> int:
        """Most requests of an instance within the TPOT SLO and KV."""
        cluster = self._cluster

        def in_time(rows: int) -> bool:
            return cluster.stages.coupled_layer_s(StepTokens(rows)) <= cluster.layer_budget_s

        kv = self.kv_requests(place.slots)
        return most_running(cluster, None, self.batch(place.num_instances), in_time, kv)

    @cached_property
    def _room(self) -> float:
        inputs = self._inputs
        gpu = inputs.profile.gpu
        usable = inputs.instance_gpus * gpu.memory_bytes * gpu.instance_memory_share
        return usable - inputs.weight_bytes
