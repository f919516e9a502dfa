# SPDX-License-Identifier: Apache-2.0
"""Times of a layer's parts: a profile's, scaled to a model.

Legend: p GPUs of an instance, x the EP degree, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_lora.config.optional_parts import StageTime
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.core.weight_format import UNQUANTISED, WeightFormat
from moe_lora.provision.device_profile import (
    Efficiency,
    MeasuredProfile,
    Profile,
    RooflineProfile,
    Sizes,
)
from moe_lora.provision.replayed.system_config import StepRows

from .memory import shard_of

US = 1e-6
LONGER = 1.25
"""Tables of attention hold up to this multiple of their context."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step: decode rows, prompt tokens, number of prompts, and attended pairs."""

    rows: float
    prompt_tokens: float = 0.0
    prompts: float = 0.0
    pairs: float = 0.0

    @property
    def all_rows(self) -> float:
        return self.rows + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class PromptsPerRow:
    """Prompt work per decode row of a mean step."""

    tokens: float = 0.0
    prompts: float = 0.0
    pairs: float = 0.0

    def step(self, rows: float) -> StepTokens:
        return StepTokens(rows, rows * self.tokens, rows * self.prompts, rows * self.pairs)


NO_PROMPTS = PromptsPerRow()


@dataclass(frozen=True, slots=True)
class ServerRound:
    """Deltas of a layer: inputs to the LoRA Server, computation, deltas back."""

    receive_s: float
    compute_s: float
    send_s: float

    @property
    def total_s(self) -> float:
        return self.receive_s + self.compute_s + self.send_s

    @property
    def longest(self) -> tuple[str, float]:
        """Name and time of the longest stage."""
        return max(
            (("receive", self.receive_s), ("compute", self.compute_s), ("send", self.send_s)),
            key=lambda stage: stage[1],
        )


def sizes_of(shape: ModelShape, lora_rank: float, instance_gpus: int, weights: str = "none") -> Sizes:
    """Sizes for stage times."""
    return Sizes(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=max(1, shape.num_experts),
        num_experts_per_token=max(1, shape.num_experts_per_token),
        lora_rank=lora_rank,
        instance_gpus=instance_gpus,
        value_bytes=shape.dtype_bytes,
        weights=weights,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


class StageTimes:
    """Times of a layer on a profile's device, in seconds.  Scaling: docs/reference/profiles.md.

    lora_rank: mean over requests.  context_tokens: mean KV per decode row.  Methods with a batch time a mean
    step, prompts included.  Raises ConfigError if the profile has no rates and is of another model or format,
    and for a context of more than LONGER times that of its attention.
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        lora_rank: float,
        instance_gpus: int,
        context_tokens: float,
        probabilities: NDArray[np.float64],
        weights: WeightFormat = UNQUANTISED,
    ) -> None:
        self._profile, self._shape, self._weights = profile, shape, weights
        self.prompts = NO_PROMPTS
        self._sizes = sizes_of(shape, lora_rank, instance_gpus, weights.name)
        self._context_tokens, self._probabilities = context_tokens, probabilities
        own = isinstance(profile, MeasuredProfile) and _is_same(profile.taken_at, self._sizes)
        self._own = profile.tables if isinstance(profile, MeasuredProfile) and own else {}
        if isinstance(profile, MeasuredProfile) and "base_us.attention" in self._own:
            there = profile.taken_at.context_tokens
            if context_tokens > LONGER * there:
                raise ConfigError(
                    f"profile {profile.name!r} has times of attention over {there} tokens, and the load has "
                    f"{context_tokens:.0f} on average, more than {LONGER:g} times as many; profile again "
                    f"with --context-tokens {math.ceil(context_tokens)}"
                )
        self._efficiency = self._resolve_efficiency()

    def server(self, ep: int, batch: float) -> ServerRound:
        """Deltas of a mean step at a stage of x ranks."""
        return self.server_of(ep, self.prompts.step(batch))

    def server_of(self, ep: int, step: StepTokens) -> ServerRound:
        """Deltas of a step at a stage of x ranks.

        A prompt reads its adapter once.  Raises ConfigError for a profile without network times.
        """
        found = self._round(ep, step.all_rows, step.rows + step.prompts)
        return replace(found, compute_s=found.compute_s + self._prompt_deltas_s(ep, step))

    def local_deltas_s(self, step: StepTokens) -> float:
        """Deltas on the instance's own GPUs."""
        gpus, rows = self._sizes.instance_gpus, step.rows + step.prompts
        if isinstance(self._profile, RooflineProfile):
            compute_s = self._compute_roofline(self._profile, gpus, rows)
        else:
            compute_s = _at_degree(self._profile, gpus, "compute", self._rows_computed(rows))
        return compute_s + self._prompt_deltas_s(gpus, step)

    def coupled_layer_s(self, step: StepTokens) -> float:
        """attention + experts + deltas, in sequence."""
        return self.attention_of(step) + self.experts_of(step) + self.local_deltas_s(step)

    def _round(self, ep: int, rows_moved: float, rows_read: float) -> ServerRound:
        if isinstance(self._profile, RooflineProfile):
            return self._server_roofline(self._profile, ep, rows_moved, rows_read)
        profile, sizes, there = self._profile, self._sizes, self._profile.taken_at
        nics = there.instance_gpus / sizes.instance_gpus
        width = sizes.value_bytes / there.value_bytes
        rows_in = rows_moved * nics * width * sizes.row_inputs / there.row_inputs
        rows_out = rows_moved * nics * width * sizes.row_outputs / there.row_outputs
        return ServerRound(
            _at_degree(profile, ep, "receive", rows_in),
            _at_degree(profile, ep, "compute", self._rows_computed(rows_read)),
            _at_degree(profile, ep, "send", rows_out),
        )

    def _rows_computed(self, rows: float) -> float:
        assert isinstance(self._profile, MeasuredProfile)
        sizes, there = self._sizes, self._profile.taken_at
        width = sizes.value_bytes / there.value_bytes
        return rows * width * sizes.row_pair_values / there.row_pair_values

    def _prompt_deltas_s(self, gpus: int, step: StepTokens) -> float:
        """Operations of prompt tokens' deltas; adapter bytes count as a decode row's."""
        if not step.prompt_tokens:
            return 0.0
        if self._efficiency is None:
            assert isinstance(self._profile, MeasuredProfile)
            least, most = (self._rows_computed(rows) for rows in (step.rows, step.all_rows))
            both_s = [_at_degree(self._profile, gpus, "compute", rows) for rows in (least, most)]
            return both_s[1] - both_s[0]
        flop_per_s = self._rates()[1] * self._efficiency.flop
        return 2 * step.prompt_tokens * self._sizes.row_pair_values / (gpus * flop_per_s)

    def experts_s(self, batch: float) -> float:
        """Base GEMMs of a mean step's experts."""
        return self.experts_of(self.prompts.step(batch))

    def experts_of(self, step: StepTokens) -> float:
        """max(weights / memory rate, rows * FLOP per row / FLOP rate); at least a table of these sizes."""
        measured_s = derived_s = 0.0
        if self._own:
            measured_s = self._own["base_us.experts"].seconds(step.all_rows)
        if self._efficiency is not None:
            derived_s = self.experts_stage.seconds(step.all_rows)
        return max(measured_s, derived_s)

    def attention_s(self, batch: float) -> float:
        """A layer without experts, in a mean step."""
        return self.attention_of(self.prompts.step(batch))

    def attention_of(self, step: StepTokens) -> float:
        """A layer without experts: decode rows, and operations of prompt tokens."""
        own = self._own.get("base_us.attention")
        if own is None:
            stage = self.attention_stage
            decode_s = stage.fixed_s + stage.per_row_s * step.rows
        else:
            decode_s = own.seconds(max(1.0, step.rows) if step.prompt_tokens else step.rows)
        if not step.prompt_tokens:
            return decode_s
        if self._efficiency is None:
            assert own is not None
            return own.seconds(step.all_rows)
        flops = 2.0 * self._attention_weights * step.prompt_tokens
        flop_per_s = self._shard.tensor_parallel * self._rates()[1] * self._efficiency.flop
        return decode_s + flops / flop_per_s + step.pairs * self.pair_s

    @property
    def _attention_weights(self) -> float:
        shape = self._shape
        return 2.0 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)

    def layer_s(self, ep: int, batch: float) -> float:
        """A mean step; deltas overlap the base GEMMs."""
        return self.remote_layer_s(ep, self.prompts.step(batch))

    def remote_layer_s(self, ep: int, step: StepTokens) -> float:
        """attention + max(experts, receive + compute + send)."""
        return self.attention_of(step) + max(self.experts_of(step), self.server_of(ep, step).total_s)

    @cached_property
    def pair_s(self) -> float:
        """Time per layer of a prompt token and an attended token; 0 for measured rows."""
        if self._efficiency is None:
            return 0.0
        flops = 4.0 * len(self._shard.heads) * self._shape.head_dim
        return flops / (self._rates()[1] * self._efficiency.flop)

    @cached_property
    def experts_stage(self) -> StageTime:
        """Every GPU reads E/p experts in each step."""
        sizes, reached, (bytes_per_s, flop_per_s) = self._sizes, self._needed(), self._rates()
        return StageTime(
            least_s=self._share(self._weights.expert_bits)
            * (sizes.expert_bytes / (sizes.instance_gpus * bytes_per_s) / reached.memory),
            per_row_s=sizes.row_flop / (sizes.instance_gpus * flop_per_s) / reached.flop,
        )

    @cached_property
    def attention_stage(self) -> StageTime:
        """Every GPU reads all attention weights, and the KV of its heads."""
        shape, reached, (bytes_per_s, _) = self._shape, self._needed(), self._rates()
        share = self._share(self._weights.attention_bits)
        weight_bytes = share * shape.dtype_bytes * self._attention_weights
        kv_heads = self._shard.shape.num_kv_heads
        kv_bytes = 2 * shape.dtype_bytes * kv_heads * shape.head_dim * self._context_tokens
        return StageTime(
            fixed_s=weight_bytes / bytes_per_s / reached.memory + US * self._profile.fixed_us.attention,
            per_row_s=kv_bytes / bytes_per_s / reached.memory,
        )

    @cached_property
    def _shard(self) -> ModelShard:
        return shard_of(self._shape, self._sizes.instance_gpus)

    def _share(self, bits: float | None) -> float:
        return 1.0 if bits is None else bits / (8 * self._shape.dtype_bytes)

    def _server_roofline(
        self, profile: RooflineProfile, ep: int, rows_moved: float, rows_read: float
    ) -> ServerRound:
        """Bytes over the busiest NIC, beside the computation."""
        sizes, fixed, gpu = self._sizes, profile.fixed_us, profile.gpu
        rate = gpu.needed("net_bytes_per_s", profile.name)
        net = rate * (profile.efficiency.net or 1.0) * min(ep, sizes.instance_gpus)
        return ServerRound(
            US * fixed.receive + rows_moved * sizes.row_inputs * sizes.value_bytes / net,
            self._compute_roofline(profile, ep, rows_read),
            US * fixed.send + rows_moved * sizes.row_outputs * sizes.value_bytes / net,
        )

    def _compute_roofline(self, profile: RooflineProfile, ranks: int, rows: float) -> float:
        """Distinct (adapter, expert) pairs read, or operations, over the ranks."""
        sizes, fixed, reached, gpu = self._sizes, profile.fixed_us, profile.efficiency, profile.gpu
        share = sizes.num_experts_per_token / sizes.num_experts
        pairs = sizes.num_experts * float(-np.expm1(-rows * share * self._probabilities).sum())
        pair_values = sizes.row_pair_values / sizes.num_experts_per_token
        read_s = pairs * pair_values * sizes.value_bytes / (ranks * gpu.bytes_per_s * reached.memory)
        flop_s = 2 * rows * sizes.row_pair_values / (ranks * gpu.flop_per_s * reached.flop)
        return US * (fixed.compute + fixed.sync_per_rank * (ranks - 1)) + max(read_s, flop_s)

    def _resolve_efficiency(self) -> Efficiency | None:
        profile, gpu = self._profile, self._profile.gpu
        if isinstance(profile, RooflineProfile):
            return profile.efficiency
        if gpu.bytes_per_s is None or gpu.flop_per_s is None:
            if "base_us.attention" in self._own:
                return None
            raise ConfigError(
                f"profile {profile.name!r} was taken at another model, or format of its weights than "
                f"{self._weights.name!r}, and names no bytes_per_s and "
                "flop_per_s to carry it over; take one of this model with `moe-lora profile`"
            )
        return table_efficiency(profile, gpu.bytes_per_s, gpu.flop_per_s)

    def _needed(self) -> Efficiency:
        assert self._efficiency is not None, "measured tables answer before a roofline is asked"
        return self._efficiency

    def _rates(self) -> tuple[float, float]:
        gpu = self._profile.gpu
        assert gpu.bytes_per_s is not None
        assert gpu.flop_per_s is not None
        return gpu.bytes_per_s, gpu.flop_per_s


class SimulatedLayers:
    """`LayerModel` by `StageTimes`.  ep: None: the instance computes deltas.

    A request with an adapter makes every row count as a row with an adapter.
    """

    def __init__(self, stages: StageTimes, ep: int | None) -> None:
        self._stages, self._ep = stages, ep
        self._found: dict[tuple[int, int, int, bool], tuple[float, float]] = {}

    def layer_s(self, step: StepRows) -> tuple[float, float]:
        """Seconds of a layer, and busy seconds of the server."""
        key = step.num_rows, step.num_prompt_tokens, step.num_prompts, step.num_with_adapter > 0
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._without_pairs(*key)
        return found[0] + self._stages.pair_s * step.num_prompt_pairs, found[1]

    def _without_pairs(
        self, rows: int, prompt_tokens: int, prompts: int, adapters: bool
    ) -> tuple[float, float]:
        stages, step = self._stages, StepTokens(rows, prompt_tokens, prompts)
        attention_s, experts_s = stages.attention_of(step), stages.experts_of(step)
        if not adapters:
            return attention_s + experts_s, 0.0
        if self._ep is None:
            return attention_s + experts_s + stages.local_deltas_s(step), 0.0
        served = stages.server_of(self._ep, step)
        return attention_s + max(experts_s, served.total_s), served.longest[1]


def table_efficiency(profile: MeasuredProfile, bytes_per_s: float, flop_per_s: float) -> Efficiency:
    """Rates of expert GEMMs: memory at the first batch, FLOP at the last."""
    there, gpus, table = profile.taken_at, profile.taken_at.instance_gpus, profile.tables["base_us.experts"]
    return Efficiency.model_construct(
        memory=there.expert_bytes / (gpus * bytes_per_s) / table.times_s[0],
        flop=table.batches[-1] * there.row_flop / (gpus * flop_per_s) / table.times_s[-1],
    )


def _is_same(there: Sizes, here: Sizes) -> bool:
    """True if tables of `there` hold for `here`."""
    base = there.model_dump(exclude={"model", "lora_rank", "context_tokens"}, exclude_none=True)
    return all(getattr(here, name) == value for name, value in base.items())


def _at_degree(profile: MeasuredProfile, ep: int, stage: str, batch: float) -> float:
    """Time at EP degree x: listed, or interpolated in log2 x; clamped at the ends."""
    listed = profile.tables.get(f"server_us.{ep}.{stage}")
    if listed is not None:
        return listed.seconds(batch)
    degrees = sorted(profile.server_us)
    times_s = [profile.tables[f"server_us.{degree}.{stage}"].seconds(batch) for degree in degrees]
    return float(np.interp(math.log2(ep), np.log2(degrees), times_s))
