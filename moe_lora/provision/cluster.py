"""What is sized, and how one layout of its LoRA Server fares under a load (InfiniLoRA section 4.2.2).

Legend: B rows per instance, L instances, x * y ranks of EPx-PPy, M adapters resident at once.

    SLO_Layer = TPOT / layers          SLO_FFN = SLO_Layer - attention(B)
    (5)  receive + compute + send <= SLO_FFN
    (6)  max(receive, compute, send) * ceil(L / y) <= SLO_Layer

Equation 6 as printed has L; that is y = 1.  With y stages the layers that L instances are at are spread over
y groups of ranks, each of which serves one request at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.partition import Layout, Partition

from .memory import AdapterMix, kv_requests, server_slots
from .profile import Gpu
from .stages import ServerRound, StageTimes

MEMORY, FIRST_TOKEN = "ttft: cache capacity", "ttft: first token"
EQ5, EQ6 = "tpot: eq5", "tpot: eq6"
CONSTRAINTS = (MEMORY, FIRST_TOKEN, EQ5, EQ6)
STEPS_TO_FIRST_TOKEN = 2.95
MOST_ROWS = 1024
MS = 1e3
_PRECISION = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is sized: a model on a device, with its SLOs.  instance_gpus: of one LLM instance.

    fixed_batch: the global batch is a given; False: it is what keeps running at the TPOT SLO, fewer requests
    where steps are faster.
    """

    shape: ModelShape
    mix: AdapterMix
    gpu: Gpu
    stages: StageTimes
    instance_gpus: int
    slo_ttft_s: float
    slo_tpot_s: float
    context_tokens: float
    fixed_batch: bool = False

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

    def steady_tpot_s(self, layout: Layout, batch: float) -> float:
        """TPOT at the batch that this TPOT keeps running: t = layers * layer(batch * t / SLO).

        batch: rows per instance at the SLO.  Found from the SLO downwards, so it is the largest solution.
        """
        tpot_s, num_layers = self.slo_tpot_s, self.shape.num_layers
        while True:
            rows = batch if self.fixed_batch else batch * tpot_s / self.slo_tpot_s
            found_s = num_layers * self.stages.layer_s(layout.ep, rows)
            if self.fixed_batch or found_s >= tpot_s * (1 - _PRECISION):
                return found_s
            tpot_s = found_s

    def first_token_s(self, layout: Layout, batch: float) -> tuple[float, float]:
        """(load, steps): P95 decode TTFT of requests that start at once is their sum.

        load: the first layer of an adapter of the largest rank, each of the x ranks of a stage loading its
        part; later layers come while earlier ones compute (InfiniLoRA section 5.3).  steps: 0.95 of the step
        under way at arrival, one during which the lease is asked for, and the request's first one.
        """
        largest = self.mix.largest().bytes_on_rank(self.shape, Layout(ep=layout.ep))
        load_s = largest / self.shape.num_layers / self.gpu.load_bytes_per_s
        return load_s, STEPS_TO_FIRST_TOKEN * self.steady_tpot_s(layout, batch)

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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout under one load: what fits, how long a round takes, and which constraints it meets."""

    layout: Layout
    slots: int
    round: ServerRound
    met: Mapping[str, bool]

    @property
    def feasible(self) -> bool:
        return all(self.met.values())


def candidate(cluster: Cluster, layout: Layout, capacity: int, num_instances: int, batch: float) -> Candidate:
    """How this layout fares with M = capacity and L = num_instances of `batch` rows each."""
    served = cluster.stages.server(layout.ep, batch)
    slots = cluster.slots(layout)
    waiting = math.ceil(num_instances / layout.pp)
    return Candidate(
        layout=layout,
        slots=slots,
        round=served,
        met={
            MEMORY: slots >= capacity,
            FIRST_TOKEN: sum(cluster.first_token_s(layout, batch)) <= cluster.slo_ttft_s,
            EQ5: served.total_s <= cluster.ffn_budget_s(batch),
            EQ6: served.longest[1] * waiting <= cluster.layer_budget_s,
        },
    )


def most_rows(cluster: Cluster, layout: Layout, num_instances: int, batch: float) -> int:
    """Most requests that an instance may decode at once: within the TPOT SLO, (5), (6) and its KV.

    MOST_ROWS at most, as an engine keeps tables of that many, but always the mean batch and four standard
    deviations of a Poisson count.
    """

    def in_time(rows: int) -> bool:
        met = candidate(cluster, layout, 1, num_instances, rows).met
        return cluster.base_holds(rows) and met[EQ5] and met[EQ6]

    least = math.ceil(batch + 4 * math.sqrt(batch))
    room = int(kv_requests(cluster.gpu, cluster.shape, cluster.instance_gpus, cluster.context_tokens))
    most = min(MOST_ROWS, room)
    return max(least, largest(in_time, most, least)) if most > least else least


def largest(holds: Callable[[int], bool], most: int, least: int = 1) -> int:
    """The largest n <= most for which `holds`, by bisection; it does at `least`, and not from some n on."""
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
