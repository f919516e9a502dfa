"""What a device does in which time: the facts that sizing rests on (files: `profile_file`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_lora.core.errors import ConfigError

# A measured stage: seconds at some batch sizes, and a line between and beyond them.


@dataclass(frozen=True, slots=True)
class Table:
    """seconds(b), piecewise linear through (batches[i], times_s[i]).

    Beyond the last point the last line goes on.  Below the first one it is the first line, or the line
    through the origin where that is higher, so that a steep table never gives a negative time.  Raises
    ConfigError for batches that do not increase from 1 or more, and for times that are not positive or
    decrease.
    """

    batches: tuple[float, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.batches) < 2 or len(self.batches) != len(self.times_s):
            raise ConfigError(
                f"{len(self.times_s)} times for {len(self.batches)} batches; give one a batch, two at least"
            )
        steps = zip(self.batches, self.batches[1:], strict=False)
        if self.batches[0] < 1 or any(not low < high for low, high in steps):
            raise ConfigError(f"batches={list(self.batches)} must increase from 1 or more")
        if not all(0 < time < math.inf for time in self.times_s):
            raise ConfigError(f"times {list(self.times_s)} must be finite and positive")
        if any(low > high for low, high in zip(self.times_s, self.times_s[1:], strict=False)):
            raise ConfigError(
                f"times {list(self.times_s)} must not fall while the batch grows; measure again"
            )

    def seconds(self, batch: float) -> float:
        """Time at this batch; 0 for an empty one."""
        if batch <= 0:
            return 0.0
        place = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        (low, high), (low_s, high_s) = (
            self.batches[place - 1 : place + 1],
            self.times_s[place - 1 : place + 1],
        )
        time_s = low_s + (high_s - low_s) * (batch - low) / (high - low)
        if batch < self.batches[0]:
            time_s = max(time_s, self.times_s[0] * batch / self.batches[0])
        return time_s


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU (or, measured on CPUs, one rank).  Rates are those of its data sheet; None = not known.

    instance_memory_share, server_memory_share: parts of the memory that weights, KV and adapters of an
    instance, and adapters of a LoRA Server, may take.  load_bytes_per_s: host to device.
    """

    memory_bytes: float
    instance_memory_share: float
    server_memory_share: float
    load_bytes_per_s: float
    bytes_per_s: float | None = None
    flop_per_s: float | None = None
    net_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of a model the stage times of one layer depend on; a dense MLP is one expert, chosen always."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    lora_rank: float
    instance_gpus: int
    value_bytes: int = 2

    @property
    def row_inputs(self) -> float:
        """Values that go to the LoRA Server for a row: inputs of gate/up and of down per chosen expert."""
        return float(self.num_experts_per_token * (self.hidden_size + self.intermediate_size))

    @property
    def row_outputs(self) -> float:
        """Values that come back for a row."""
        return float(self.num_experts_per_token * (self.hidden_size + 2 * self.intermediate_size))

    @property
    def row_pair_values(self) -> float:
        """Adapter values of the experts that one row chooses: gate, up and down, A and B."""
        width = self.hidden_size + self.intermediate_size
        return 3.0 * self.num_experts_per_token * width * self.lora_rank

    @property
    def row_flop(self) -> float:
        """Operations of the base GEMMs of a row's experts."""
        return 6.0 * self.num_experts_per_token * self.hidden_size * self.intermediate_size

    @property
    def expert_bytes(self) -> float:
        """Base weights of a layer's experts."""
        return 3.0 * self.value_bytes * self.num_experts * self.hidden_size * self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class ServerTables:
    """Measured times of a layer's deltas for one instance, by the instance's batch."""

    receive: Table
    compute: Table
    send: Table


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Measurements of one model.  server: by the EP degree x of the LoRA Server's layout.

    attention: of all of a layer but its experts; None = derived from rates and `fixed_us.attention`.
    """

    taken_at: Sizes
    server: Mapping[int, ServerTables]
    experts: Table
    attention: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of the data sheet's rates that are reached."""

    memory: float
    flop: float
    net: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FixedTimes:
    """What a stage takes however small the batch; sync_per_rank_s: for each further rank of a stage."""

    receive_s: float = 0.0
    compute_s: float = 0.0
    send_s: float = 0.0
    attention_s: float = 0.0
    sync_per_rank_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A device, with either `tables` or an `efficiency`; `sources` says where the numbers come from."""

    name: str
    gpu: Gpu
    fixed: FixedTimes
    tables: Tables | None = None
    efficiency: Efficiency | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
