# SPDX-License-Identifier: Apache-2.0
"""The emulated devices of `bench_disagg`: capacities and times.

Memory.  An instance owns `instance_gpus` GPUs: weights first, then KV and adapters share the rest of an
engine's part.  A server GPU holds adapters only.  DBRX on 4 GPUs of 95.6 GiB: 245 GiB of weights of 344 GiB;
3.87 GiB an adapter; 164 kB of KV a token: 12 adapters at 50/50, 10 at 40/60, and 90 on 4 server GPUs.  The
tiny model that really runs gets the real device's *number* of adapter slots, and KV for its number of average
requests; bytes are its own.

Time.  `moe_lora.provision` gives each stage of one real layer on the profile file's hardware; a layer of the
tiny model takes the time of (real layers / its layers).  Sources and assumptions are in the two files.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.shape import ModelShape
from moe_lora.provision.device_profile import read_profile
from moe_lora.provision.plan.memory import AdapterMix, known_model
from moe_lora.provision.plan.stages import StageTimes
from moe_lora.report.results import read_json

PROFILE = Path(__file__).parents[1] / "profiles" / "dbrx_hopper96.json"
GIB = 2**30
US = 1e-6
SERVER_EP = 4
LINE_ROWS = (128, 256)


@dataclass(frozen=True)
class Stages:
    """Stage times of one real layer, of deltas by the paper's kernels."""

    attention: StageTime
    experts: StageTime
    lora: StageTime
    transfer: StageTime


class Device:
    """Budgets and times of a profile file.  slowdown: factor of all times."""

    def __init__(self, profile: dict[str, Any]) -> None:
        self.profile = profile
        self.assumed, self.instance_gpus = profile["assumed"], profile["instance_gpus"]
        self.num_parameters = profile["shape"]["num_parameters"]
        self.hardware = read_profile(profile["hardware"])
        self.gpu = self.hardware.gpu
        self.shape = _model_shape(profile["shape"])
        self.mix = AdapterMix(ranks=((profile["shape"]["lora_rank"], 1.0),))
        self.stages = self._stages()

    @property
    def adapter_bytes(self) -> int:
        """gate, up and down of every expert, at the rank of table 3."""
        return int(self.mix.adapter_bytes(self.shape))

    @property
    def kv_token_bytes(self) -> int:
        return self.shape.kv_bytes_per_token()

    @property
    def free_bytes(self) -> float:
        """An instance's memory for KV and adapters."""
        usable = self.instance_gpus * self.gpu.memory_bytes * self.gpu.instance_memory_share
        return usable - self.num_parameters * self.shape.dtype_bytes

    def instance_slots(self, adapter_share: float) -> int:
        """Adapters in an instance's share."""
        return int(adapter_share * self.free_bytes / self.adapter_bytes)

    def server_slots(self, num_gpus: int) -> int:
        usable = num_gpus * self.gpu.memory_bytes * self.gpu.server_memory_share
        return int(usable / self.adapter_bytes)

    def kv_requests(self, adapter_share: float) -> float:
        """Requests of average length with KV beside the adapters."""
        tokens = (1 - adapter_share) * self.free_bytes / self.kv_token_bytes
        return tokens / self.assumed["context_tokens"]

    def load_s(self, num_gpus: int) -> float:
        """One adapter, each GPU loading its part."""
        return self.adapter_bytes / (num_gpus * self.gpu.needed("load_bytes_per_s", "dbrx_hopper96"))

    def step_profile(
        self, num_layers: int, slowdown: float, *, kernel_ratio: float, overlap: bool
    ) -> StepProfile:
        """For a model of `num_layers`.  kernel_ratio: time of the LoRA kernels over the paper's."""
        factor = slowdown * self.shape.num_layers / num_layers
        stages = self.stages
        return StepProfile(
            attention=_longer(stages.attention, factor),
            experts=_longer(stages.experts, factor),
            lora=_longer(stages.lora, factor * kernel_ratio),
            transfer=_longer(stages.transfer, factor),
            overlap=overlap,
        )

    def step_s(
        self, num_rows: float, *, remote: bool, kernel_ratio: float = 1.0, overlap: bool = True
    ) -> float:
        """A whole decode step of `num_rows` rows with adapters, the server waiting for nobody else."""
        stages, rows = self.stages, int(num_rows) + 1
        base, lora = stages.experts.seconds(rows), kernel_ratio * stages.lora.seconds(rows)
        if remote:
            lora += stages.transfer.seconds(rows)
        experts = max(base, lora) if remote and overlap else base + lora
        return self.shape.num_layers * (stages.attention.seconds(rows) + experts)

    def describe(self) -> dict[str, Any]:
        return {
            "adapter_gib": self.adapter_bytes / GIB,
            "kv_token_bytes": self.kv_token_bytes,
            "free_gib": self.free_bytes / GIB,
            "slots_50_50": self.instance_slots(0.5),
            "slots_40_60": self.instance_slots(0.4),
            "stages_us": {
                name: {key: value / US for key, value in vars(stage).items()}
                for name, stage in vars(self.stages).items()
            },
        }

    def _stages(self) -> Stages:
        (lora_rank, _), context_tokens = self.mix.ranks[0], self.assumed["context_tokens"]
        times = StageTimes(
            self.hardware, self.shape, lora_rank, self.instance_gpus, context_tokens, np.ones(1)
        )
        rounds = [times.server(SERVER_EP, rows) for rows in LINE_ROWS]
        return Stages(
            attention=times.attention_stage,
            experts=times.experts_stage,
            lora=_line([served.compute_s for served in rounds]),
            transfer=_line([served.receive_s + served.send_s for served in rounds]),
        )


def read_device(path: Path = PROFILE) -> Device:
    return Device(read_json(path))


def _model_shape(sizes: dict[str, Any]) -> ModelShape:
    known = known_model("DBRX").shape
    names = {field.name for field in fields(known)}
    return replace(known, **{name: size for name, size in sizes.items() if name in names})


def _line(seconds: list[float]) -> StageTime:
    """The line through the times of LINE_ROWS."""
    low, high = LINE_ROWS
    per_row_s = (seconds[1] - seconds[0]) / (high - low)
    return StageTime(fixed_s=seconds[0] - low * per_row_s, per_row_s=per_row_s)


def _longer(stage: StageTime, factor: float) -> StageTime:
    return StageTime(**{name: factor * value for name, value in vars(stage).items()})
