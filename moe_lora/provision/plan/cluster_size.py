"""What is sized, and what keeps running on it (InfiniLoRA section 4.2.2).

Legend: B rows per instance, L instances, x * y ranks of EPx-PPy, M adapters resident at once.

    SLO_Layer = TPOT / layers          SLO_FFN = SLO_Layer - attention(B)
    (5)  receive + compute + send <= SLO_FFN
    (6)  max(receive, compute, send) * ceil(L / y) <= SLO_Layer

Equation 6 as printed has L; that is y = 1.  With y stages the layers that L instances are at are spread over
y groups of ranks, each of which serves one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.protocol.partition import Layout, Partition
from moe_lora.provision.profile import Gpu

from .memory import STEPS_TO_FIRST_TOKEN, AdapterLoads, AdapterMix, LoadQueue, kv_requests, server_slots
from .stages import StageTimes

MEMORY, FIRST_TOKEN, LOADS = "ttft: cache capacity", "ttft: first token", "ttft: loads"
EQ5, EQ6 = "tpot: eq5", "tpot: eq6"
CONSTRAINTS = (MEMORY, LOADS, FIRST_TOKEN, EQ5, EQ6)
MS = 1e3
_PRECISION = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is sized: a model on a device, with its SLOs.  instance_gpus: of one LLM instance.

    The load is global_batch requests that decode at once, or tokens_per_s output tokens (rate times length):
    then what keeps running follows from the layout's own TPOT, and a plan is made for load_margin more.
    loads: of adapters, by its requests.
    """

    shape: ModelShape
    mix: AdapterMix
    gpu: Gpu
    stages: StageTimes
    loads: AdapterLoads
    instance_gpus: int
    slo_ttft_s: float
    slo_tpot_s: float
    context_tokens: float
    tokens_per_s: float | None = None
    global_batch: float | None = None
    load_margin: float = 0.0
    _alone: dict[tuple[int, int], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def layer_budget_s(self) -> float:
        """SLO_Layer."""
        return self.slo_tpot_s / self.shape.num_layers

    def ffn_budget_s(self, batch: float) -> float:
        """SLO_FFN."""
        return self.layer_budget_s - self.stages.attention_s(batch)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every EPx-PPy that the model and its instances allow, by number of ranks.

        Raises ConfigError if an instance's GPUs can't share the experts.
        """
        Partition(self.shape, Layout(), self.instance_gpus, sites="auto")
        return tuple(sorted(self._layouts(), key=lambda layout: (layout.num_ranks, layout.ep)))

    def slots(self, layout: Layout) -> int:
        """Adapters that a server of this layout holds."""
        return server_slots(self.gpu, self.shape, self.mix, layout)

    @cached_property
    def max_batch(self) -> tuple[int, str]:
        """Most rows an instance can decode on average without LoRA, and what limits them: "tpot" or "kv".

        KV has to hold the mean and four standard deviations of a Poisson count: b + 4 sqrt(b) requests.
        Raises SloError if a single row takes longer than the SLO, ConfigError if the model does not fit.
        """
        room = kv_requests(self.gpu, self.shape, self.instance_gpus, self.context_tokens)
        kv = max(1, int((math.sqrt(room + 4) - 2) ** 2))
        if room < 1:
            raise ConfigError(
                f"the KV of one request of {self.context_tokens:.0f} tokens does not fit beside the weights "
                f"of an instance; raise --instance-gpus={self.instance_gpus}"
            )
        if not self.base_holds(1):
            base_s = self.stages.attention_s(1) + self.stages.experts_s(1)
            raise SloError(
                f"TPOT SLO {self.slo_tpot_s:g} s leaves {self.layer_budget_s * MS:.3f} ms a layer; attention "
                f"+ experts of the base model alone take {base_s * MS:.3f} ms, "
                f"{(base_s - self.layer_budget_s) * MS:.3f} ms more; raise --slo-tpot-s or --instance-gpus"
            )
        batch = largest(self.base_holds, kv)
        return batch, "kv" if batch == kv else "tpot"

    def steady_rows(self, ep: int, num_instances: int, layout: Layout | None = None) -> float:
        """Rows B of an instance that its own TPOT keeps running: B = tokens per second * tpot_s(B) / L.

        Little's law.  The smallest solution, approached from an idle cluster, so it does not depend on the
        SLOs; or the first B on that way that is over a limit, where there is none within.  layout: steps wait
        for its loads too; None: for none.
        """
        if self.global_batch is not None:
            return self.global_batch / num_instances
        assert self.tokens_per_s is not None, "a cluster has one of the two"
        if layout is None:
            if (ep, num_instances) not in self._alone:
                self._alone[ep, num_instances] = self._steady_rows(
                    lambda rows: self.tpot_s(ep, rows), 0.0, num_instances
                )
            return self._alone[ep, num_instances]
        queue = self.load_queue(layout, self.tokens_per_s / self.loads.output_tokens)
        # No step is shorter than without loads, so the way leads over the rows of those.
        return self._steady_rows(
            lambda rows: queue.step_s(self.tpot_s(ep, rows), num_instances, self.shape.num_layers),
            self.steady_rows(ep, num_instances),
            num_instances,
        )

    def _steady_rows(self, longer_s: Callable[[float], float], rows: float, num_instances: int) -> float:
        """The fixed point from `rows` on.  longer_s: a step of so many rows."""
        assert self.tokens_per_s is not None
        per_instance, most = self.tokens_per_s / num_instances, self.max_batch[0] / (1 + self.load_margin)
        tpot_s = longer_s(max(1.0, rows))
        while tpot_s * per_instance > rows * (1 + _PRECISION):
            rows = tpot_s * per_instance
            if rows > most or tpot_s > self.slo_tpot_s:
                break
            tpot_s = longer_s(rows)
        return rows

    def batch(self, ep: int, num_instances: int, layout: Layout | None = None) -> float:
        """Rows of an instance that a plan is made for: those that keep running, and the margin."""
        return self.steady_rows(ep, num_instances, layout) * (1 + self.margin)

    @property
    def margin(self) -> float:
        """load_margin; 0 of a given global batch."""
        return self.load_margin if self.global_batch is None else 0.0

    def tokens_at(self, layout: Layout, num_instances: int, global_batch: float) -> float:
        """Output tokens per second of the load that a plan for this global batch is made for."""
        running = global_batch / (1 + self.margin)
        return running / self.step_s(layout, num_instances, running / num_instances)[0]

    def load_queue(self, layout: Layout, requests_per_s: float) -> LoadQueue:
        """The loads of so many requests on the fullest rank of the layout."""
        load_s = self.mix.bytes_on_rank(self.shape, layout) / self.gpu.load_bytes_per_s
        return self.loads.queue(requests_per_s, self.slots(layout), load_s)

    def step_s(self, layout: Layout, num_instances: int, batch: float) -> tuple[float, LoadQueue]:
        """A step of an instance that runs `batch` rows, waits for loads included, and those loads.

        As a closed system: rows that take longer ask for new adapters less often, so there is a solution
        t = step(batch L / (output tokens t)) for every batch, found by bisection.
        """
        unhindered_s = self.tpot_s(layout.ep, batch)
        requests = num_instances * max(1.0, batch) / self.loads.output_tokens

        def at(step_s: float) -> tuple[float, LoadQueue]:
            queue = self.load_queue(layout, requests / step_s)
            return queue.step_s(unhindered_s, num_instances, self.shape.num_layers), queue

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
        """layers * (attention + max(experts, LoRA round)) of a step, which has one row at least."""
        return self.shape.num_layers * self.stages.layer_s(ep, max(1.0, batch))

    def first_token_s(self, layout: Layout, tpot_s: float) -> tuple[float, float]:
        """(load, steps): P95 decode TTFT of requests that start at once is their sum.

        load: the first layer of an adapter of the largest rank, each of the x ranks of a stage loading its
        part; later layers come while earlier ones compute (InfiniLoRA section 5.3).  steps: 0.95 of the step
        under way at arrival, one during which the lease is asked for, and the request's first one.
        """
        largest = self.mix.largest().bytes_on_rank(self.shape, Layout(ep=layout.ep))
        load_s = largest / self.shape.num_layers / self.gpu.load_bytes_per_s
        return load_s, STEPS_TO_FIRST_TOKEN * tpot_s

    def base_holds(self, batch: float) -> bool:
        """Whether the base model alone decodes so many rows within the TPOT SLO."""
        return self.stages.attention_s(batch) + self.stages.experts_s(batch) <= self.layer_budget_s

    def _layouts(self) -> Iterator[Layout]:
        most = self.shape.num_experts or len(self.shape.sites)
        for ep in range(1, most + 1):
            for pp in range(1, self.shape.num_layers + 1):
                layout = Layout(ep=ep, pp=pp)
                try:
                    Partition(self.shape, layout, self.instance_gpus, sites="auto")
                except ConfigError:
                    break  # what is wrong is x, whatever y
                yield layout


def largest(holds: Callable[[int], bool], most: int, least: int = 1) -> int:
    """The largest n <= most for which `holds`, by bisection; it does at `least`, and not from some n on."""
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
