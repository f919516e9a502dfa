# SPDX-License-Identifier: Apache-2.0
"""Load and limits of a cluster to size (InfiniLoRA section 4.2.2).

Legend: B rows per instance, L instances, x * y ranks of EPx-PPy, M resident adapters.

    SLO_Layer = TPOT / layers          SLO_FFN = SLO_Layer - attention(B)
    (5)  receive + compute + send <= SLO_FFN
    (6)  max(receive, compute, send) * ceil(L / y) <= SLO_Layer

The paper prints L in equation 6, for y = 1.  A group of ranks, one of y, serves one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property, partial

from moe_lora.config.plan import ESTIMATORS
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.partition import Layout, Partition
from moe_lora.provision.admission.admitted import NeededCapacity, largest
from moe_lora.timing.host_times import LinkTime

from .inputs import PlanInputs
from .memory import STEPS_TO_FIRST_TOKEN, LoadQueue, miss_share, server_bytes
from .stages import StageTimes, StepTokens

MEMORY, FIRST_TOKEN, LOADS = "ttft: cache capacity", "ttft: first token", "ttft: loads"
EQ5, EQ6 = "tpot: eq5", "tpot: eq6"
CONSTRAINTS = (MEMORY, LOADS, FIRST_TOKEN, EQ5, EQ6)
MS = 1e3
_PRECISION = 1e-6
MOST_STEP_TOKENS, LEAST_STEP_TOKENS = 8192, 64
"""Bounds of a step's token budget, a multiple of the second."""
GRID = 1.05
PARTS_OF_A_ROW = 16
"""Unit of batches: a mean step of prompts may have less than one decode row."""


class Cluster:
    """A model on a device, with load and SLOs, to size.  capacity_of: M* of a global batch."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self.margin = inputs.load_margin if inputs.global_batch is None else 0.0
        self.layer_budget_s = inputs.slo_tpot_s / inputs.shape.num_layers
        self.stages = StageTimes(
            inputs.profile,
            inputs.shape,
            inputs.mix.mean_rank,
            inputs.instance_gpus,
            inputs.context_tokens,
            inputs.probabilities,
            inputs.weights,
        )
        if inputs.prompts is not None:
            self.stages.prompts = inputs.prompts.per_row
        self.capacity_of = {
            name: NeededCapacity(name, inputs.probabilities, inputs.target_iar, inputs.adapter_share)
            for name in ESTIMATORS
        }
        self._miss_share = cache(partial(miss_share, inputs.probabilities))
        self.alone: dict[tuple[int | None, int], float] = {}
        """Rows without loads, by EP degree (None: coupled) and instances."""
        self._step_tokens: dict[tuple[int | None, int], int] = {}

    def ffn_budget_s(self, batch: float) -> float:
        """SLO_FFN."""
        return self.layer_budget_s - self.stages.attention_s(batch)

    @cached_property
    def in_service(self) -> float:
        """Requests with an adapter and KV over decoding requests."""
        prompts = self.inputs.prompts
        if prompts is None:
            return 1.0
        steps = 1 + prompts.computed_tokens / self.step_tokens(None, 1.0)
        return 1 + steps / self.inputs.output_tokens

    def step_tokens(self, ep: int | None, rows: float) -> int:
        """Most rows of a step within the TPOT SLO, with `rows` decode rows; at least LEAST_STEP_TOKENS.

        ep: None: deltas on the instance.
        """

        def in_time(parts: int) -> bool:
            prompt_tokens = max(0.0, parts * LEAST_STEP_TOKENS - rows)
            step = StepTokens(rows, prompt_tokens, 1.0, prompt_tokens * self._context_of_a_token)
            layer_s = (
                self.stages.coupled_layer_s(step) if ep is None else self.stages.remote_layer_s(ep, step)
            )
            return layer_s <= self.layer_budget_s

        key = ep, math.ceil(rows)
        if key not in self._step_tokens:
            most = MOST_STEP_TOKENS // LEAST_STEP_TOKENS
            self._step_tokens[key] = LEAST_STEP_TOKENS * largest(in_time, most)
        return self._step_tokens[key]

    @cached_property
    def _context_of_a_token(self) -> float:
        per_row = self.stages.prompts
        return per_row.pairs / per_row.tokens if per_row.tokens else 0.0

    @cached_property
    def least_rows(self) -> float:
        """Decode rows of the mean step with one token."""
        return 1 / (1 + self.stages.prompts.tokens)

    def needed(self, global_batch: float) -> int:
        """M* of a global batch; with prompts, of the next on a grid, to limit calls."""
        in_service = global_batch * self.in_service
        if self.inputs.prompts is not None and in_service > 0:
            in_service = GRID ** math.ceil(math.log(in_service, GRID) - _PRECISION)
        return self.capacity_of[self.inputs.estimator](in_service)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every allowed EPx-PPy, by number of ranks.

        Raises ConfigError if GPUs can't share the experts, SloError if they divide sites.
        """
        shard = self.inputs.shard
        if shard.divides_inner:
            raise SloError(
                f"a plan times whole sites at a LoRA Server, and the {shard.tensor_parallel} GPUs of an "
                "instance divide those of a dense model; give --instance-gpus 1"
            )
        self._partition(Layout())
        return tuple(sorted(self._layouts(), key=lambda layout: (layout.num_ranks, layout.ep)))

    def slots(self, layout: Layout) -> int:
        """Adapter slots of a server."""
        inputs = self.inputs
        return int(server_bytes(inputs.profile.gpu) / inputs.mix.bytes_on_rank(inputs.shape, layout))

    @cached_property
    def kv_requests(self) -> float:
        """Requests whose KV fits beside the weights.  Raises ConfigError for too large weights."""
        gpu, gpus = self.inputs.profile.gpu, self.inputs.instance_gpus
        usable = gpus * gpu.memory_bytes * gpu.instance_memory_share
        weights = self.inputs.weight_bytes
        if weights >= usable:
            raise ConfigError(
                f"the base model's {weights / 1e9:.1f} GB exceed what {gpus} GPUs give an instance "
                f"({usable / 1e9:.1f} GB) by {(weights - usable) / 1e9:.1f} GB; raise --instance-gpus, "
                "or give --quantize"
            )
        return (usable - weights) / (self.inputs.kv_token_bytes * self.inputs.context_tokens)

    @cached_property
    def max_batch(self) -> tuple[float, str]:
        """Most mean decode rows of an instance without LoRA, and the limit: "tpot" or "kv".

        KV holds b + 4 sqrt(b) requests: four standard deviations of a Poisson count.  Raises SloError if a
        row exceeds the SLO, ConfigError if the model does not fit.
        """
        room, prompts, context = self.kv_requests, self.inputs.prompts, self.inputs.context_tokens
        parts = 1 if prompts is None else PARTS_OF_A_ROW
        kv = max(1, int((math.sqrt(room + 4) - 2) ** 2 / self.in_service * parts))
        tokens = context if prompts is None else max(context, prompts.longest_kv_tokens)
        if room * context < tokens:
            raise ConfigError(
                f"the KV of one request of {tokens:.0f} tokens does not fit beside the "
                f"weights of an instance; raise --instance-gpus={self.inputs.instance_gpus}"
            )
        if not self.base_holds(1 / parts):
            base_s = self.stages.attention_s(1 / parts) + self.stages.experts_s(1 / parts)
            raise SloError(
                f"TPOT SLO {self.inputs.slo_tpot_s:g} s leaves {self.layer_budget_s * MS:.3f} ms a layer; "
                f"attention + experts of the base model alone take {base_s * MS:.3f} ms, "
                f"{(base_s - self.layer_budget_s) * MS:.3f} ms more; raise --slo-tpot-s or --instance-gpus"
            )
        batch = largest(lambda number: self.base_holds(number / parts), kv)
        return batch / parts, "kv" if batch == kv else "tpot"

    def steady_rows(self, layout: Layout, num_instances: int, *, loads: bool) -> float:
        """Rows B of an instance in steady state: B = tokens per second * tpot_s(B) / L (Little's law).

        Without a solution, the first B over a limit.  loads: include waits for loads.
        """
        inputs = self.inputs
        if inputs.global_batch is not None:
            return inputs.global_batch / num_instances
        key = layout.ep, num_instances
        if not loads:
            if key not in self.alone:
                self.alone[key] = self.fixed_point(lambda rows: self.tpot_s(layout.ep, rows), 0.0, key[1])
            return self.alone[key]
        assert inputs.rate_per_s is not None, "a load has a rate or a global batch"
        queue = self.load_queue(layout, inputs.rate_per_s)
        return self.fixed_point(
            lambda rows: queue.step_s(self.tpot_s(layout.ep, rows), num_instances, inputs.shape.num_layers),
            self.steady_rows(layout, num_instances, loads=False),
            num_instances,
        )

    def fixed_point(self, longer_s: Callable[[float], float], rows: float, num_instances: int) -> float:
        """Steady rows, from `rows` on.  longer_s: step time by rows."""
        assert self.inputs.rate_per_s is not None
        per_instance = self.inputs.rate_per_s * self.inputs.output_tokens / num_instances
        most = self.max_batch[0] / (1 + self.margin)
        tpot_s = longer_s(max(self.least_rows, rows))
        while tpot_s * per_instance > rows * (1 + _PRECISION):
            before, rows, before_s = rows, tpot_s * per_instance, tpot_s
            if rows > most or tpot_s > self.inputs.slo_tpot_s:
                break
            tpot_s = longer_s(rows)
            if self.inputs.prompts is None or rows <= before:
                continue
            # A secant shortens the way; times are convex here: it stays below the solution.
            slope = (tpot_s - before_s) * per_instance / (rows - before)
            if slope < 1:
                further = rows + (tpot_s * per_instance - rows) / (1 - slope)
                further_s = longer_s(further)
                if further_s * per_instance >= further:
                    rows, tpot_s = further, further_s
        return rows

    def batch(self, layout: Layout, num_instances: int, *, loads: bool) -> float:
        """Steady rows of an instance, and the margin."""
        return self.steady_rows(layout, num_instances, loads=loads) * (1 + self.margin)

    def tokens_at(self, layout: Layout, num_instances: int, global_batch: float) -> float:
        """Output tokens per second behind a global batch."""
        running = global_batch / (1 + self.margin)
        return running / self.step_s(layout, num_instances, running / num_instances)[0]

    def load_s(self, layout: Layout) -> float:
        """Load time of an adapter, on the fullest rank."""
        inputs = self.inputs
        return self._link.seconds(inputs.mix.bytes_on_rank(inputs.shape, layout))

    def load_queue(self, layout: Layout, requests_per_s: float) -> LoadQueue:
        """The loads of this request rate on the fullest rank."""
        misses = self._miss_share(self.slots(layout))
        return LoadQueue(
            loads_per_s=requests_per_s * self.inputs.adapter_share * misses,
            load_s=self.load_s(layout),
            misses=misses,
        )

    def step_s(self, layout: Layout, num_instances: int, batch: float) -> tuple[float, LoadQueue]:
        """Seconds of a step with waits for loads, and the queue of loads.

        A closed system: longer steps ask for fewer adapters.
        """
        unhindered_s = self.tpot_s(layout.ep, batch)
        requests = num_instances * max(self.least_rows, batch) / self.inputs.output_tokens

        def at(step_s: float) -> tuple[float, LoadQueue]:
            queue = self.load_queue(layout, requests / step_s)
            return queue.step_s(unhindered_s, num_instances, self.inputs.shape.num_layers), queue

        found = at(unhindered_s)
        if found[0] <= unhindered_s * (1 + _PRECISION):
            return found
        low_s = high_s = unhindered_s
        while at(high_s)[0] > high_s:
            low_s, high_s = high_s, 2 * high_s
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if at(middle_s)[0] > middle_s else (low_s, middle_s)
        return high_s, at(high_s)[1]

    def tpot_s(self, ep: int, batch: float) -> float:
        """layers * (attention + max(experts, LoRA round)) of a mean step; at least one token."""
        return self.inputs.shape.num_layers * self.stages.layer_s(ep, max(self.least_rows, batch))

    def first_token_s(self, layout: Layout, tpot_s: float) -> tuple[float, float]:
        """(load, steps): the sum is P95 TTFT with an immediate start and no wait for further prompts.

        load: the first layer of an adapter of largest rank, in x parts (InfiniLoRA section 5.3).
        """
        shape = self.inputs.shape
        largest = self.inputs.mix.largest().bytes_on_rank(shape, Layout(ep=layout.ep))
        load_s = self._link.seconds(largest / shape.num_layers)
        return load_s, STEPS_TO_FIRST_TOKEN * tpot_s + self.prefill_s(layout.ep, tpot_s)

    def prefill_s(self, ep: int | None, tpot_s: float) -> float:
        """Extra time of a 95th-percentile prompt before the first token.

        tpot_s: of a mean step.
        """
        prompts = self.inputs.prompts
        if prompts is None:
            return 0.0
        tokens = self.step_tokens(ep, 0.0)
        further = math.ceil(prompts.p95_computed / tokens) - 1
        last = prompts.p95_computed - further * tokens
        return further * max(tokens * self.token_s(ep), tpot_s) + last * self.token_s(ep)

    def check_prompts(self) -> None:
        """Raise SloError if the base model is too slow for the 95th-percentile prompt."""
        prompts, slo_s = self.inputs.prompts, self.inputs.slo_ttft_s
        if prompts is None:
            return
        tokens = prompts.p95_computed
        step = StepTokens(0.0, tokens, 1.0, tokens * tokens / 2)
        base_s = self.inputs.shape.num_layers * (
            self.stages.attention_of(step) + self.stages.experts_of(step)
        )
        if base_s > slo_s:
            raise SloError(
                f"TTFT SLO {slo_s:g} s: 5 % of the prompts compute {tokens:.0f} tokens or more, which take "
                f"the base model alone {base_s:.3f} s on the {self.inputs.instance_gpus} GPUs of an "
                f"instance, "
                f"{base_s - slo_s:.3f} s too long; raise --slo-ttft-s or --instance-gpus"
            )

    def token_s(self, ep: int | None, tokens: int | None = None) -> float:
        """Time of a prompt token in a step of `tokens`; None: in a full step within the TPOT SLO."""
        tokens = self.step_tokens(ep, 0.0) if tokens is None else tokens
        step = StepTokens(0.0, tokens, 1.0, tokens * self._context_of_a_token)
        layer_s = self.stages.coupled_layer_s(step) if ep is None else self.stages.remote_layer_s(ep, step)
        return self.inputs.shape.num_layers * layer_s / tokens

    @property
    def _link(self) -> LinkTime:
        profile = self.inputs.profile
        return LinkTime(profile.gpu.needed("load_bytes_per_s", profile.name))

    def base_holds(self, batch: float) -> bool:
        """True if the base model alone decodes `batch` rows within the SLO."""
        return self.stages.attention_s(batch) + self.stages.experts_s(batch) <= self.layer_budget_s

    def _layouts(self) -> Iterator[Layout]:
        shape = self.inputs.shape
        for ep in range(1, (shape.num_experts or len(shape.sites)) + 1):
            with suppress(ConfigError):
                self._partition(Layout(ep=ep))
                yield from (Layout(ep=ep, pp=pp) for pp in range(1, shape.num_layers + 1))

    def _partition(self, layout: Layout) -> Partition:
        return Partition(self.inputs.shape, layout, self.inputs.instance_gpus, sites="auto")
