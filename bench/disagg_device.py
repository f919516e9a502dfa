"""The emulated devices of `bench_disagg`: what fits on them, and how long they take.

Legend: E experts, K experts per token, D hidden size, F expert inner size, R LoRA rank.

Memory.  An instance owns `instance_gpus` GPUs: weights, then KV and adapters share what is left of the part
of memory that an engine uses.  A server GPU holds adapters only.  For DBRX on 4 GPUs of 95.6 GiB, that is
245 GiB of weights of 344 GiB; 3.87 GiB an adapter; 164 kB of KV a token: 12 adapters at 50/50, 10 at 40/60,
and 90 on 4 server GPUs.  The tiny model that really runs gets the *number* of adapter slots of the real
device, and room for the KV of as many average requests as fit there; bytes are its own.

Time.  A profile file gives each stage of one real layer; the tiny model has fewer layers, so each of its
layers takes the time of (real layers / its layers).  Sources and assumptions stand in the profile file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_lora.core.step_profile import StageTime, StepProfile
from moe_lora.report.results import read_json

PROFILE = Path(__file__).parent / "profiles" / "dbrx_hopper96.json"
GIB = 2**30
US = 1e-6


@dataclass(frozen=True)
class Stages:
    """Stage times of one real layer, of deltas by the paper's kernels."""

    attention: StageTime
    experts: StageTime
    lora: StageTime
    transfer: StageTime


class Device:
    """Budgets and times that a profile file implies.  slowdown: all times are that much longer."""

    def __init__(self, profile: dict[str, Any]) -> None:
        self.profile = profile
        self.shape, self.gpu, self.assumed = profile["shape"], profile["gpu"], profile["assumed"]
        self.stages = _stages(profile)

    @property
    def adapter_bytes(self) -> int:
        """gate, up and down of every expert, at the rank of table 3."""
        shape = self.shape
        pair = 3 * (shape["hidden_size"] + shape["intermediate_size"]) * shape["lora_rank"]
        return pair * shape["num_experts"] * shape["num_layers"] * shape["value_bytes"]

    @property
    def kv_token_bytes(self) -> int:
        shape = self.shape
        return 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] * shape["value_bytes"]

    @property
    def free_bytes(self) -> float:
        """An instance's memory for KV and adapters."""
        gpu = self.gpu
        usable = gpu["instance_gpus"] * gpu["memory_gib"] * GIB * gpu["instance_memory_share"]
        return usable - self.shape["num_parameters"] * self.shape["value_bytes"]

    def instance_slots(self, adapter_share: float) -> int:
        """Adapters that fit into an instance's share."""
        return int(adapter_share * self.free_bytes / self.adapter_bytes)

    def server_slots(self, num_gpus: int) -> int:
        gpu = self.gpu
        return int(num_gpus * gpu["memory_gib"] * GIB * gpu["server_memory_share"] / self.adapter_bytes)

    def kv_requests(self, adapter_share: float) -> float:
        """Requests of average length whose KV fits beside the adapters."""
        tokens = (1 - adapter_share) * self.free_bytes / self.kv_token_bytes
        return tokens / self.assumed["context_tokens"]

    def load_s(self, num_gpus: int) -> float:
        """One adapter, each GPU loading its part."""
        return self.adapter_bytes / (num_gpus * self.gpu["load_bytes_per_s"])

    def step_profile(
        self, num_layers: int, slowdown: float, *, kernel_ratio: float, overlap: bool
    ) -> StepProfile:
        """For a model of `num_layers`.  kernel_ratio: time of the LoRA kernels by that of the paper's."""
        factor = slowdown * self.shape["num_layers"] / num_layers
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
        return self.shape["num_layers"] * (stages.attention.seconds(rows) + experts)

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


def read_device(path: Path = PROFILE) -> Device:
    return Device(read_json(path))


def _stages(profile: dict[str, Any]) -> Stages:
    table, shape, gpu, assumed = (profile[key] for key in ("table4", "shape", "gpu", "assumed"))
    bytes_per_s, flop_per_s = gpu["bytes_per_s"], gpu["flop_per_s"]
    e_mem = _expert_bytes(table) / (table["instance_gpus"] * bytes_per_s) / (table["moe_us"][0] * US)
    e_flop = 256 * _row_flop(table) / (table["instance_gpus"] * flop_per_s) / (table["moe_us"][1] * US)
    gpus = gpu["instance_gpus"]
    experts = StageTime(
        least_s=_expert_bytes(shape) / (gpus * bytes_per_s) / e_mem,
        per_row_s=_row_flop(shape) / (gpus * flop_per_s) / e_flop,
    )
    head = shape["head_dim"]
    weights = 4 * shape["hidden_size"] * head * (shape["num_heads"] + shape["num_kv_heads"])
    kv_row = 4 * shape["num_kv_heads"] * head * assumed["context_tokens"]
    attention = StageTime(
        fixed_s=weights / bytes_per_s / e_mem + assumed["attention_fixed_us"] * US,
        per_row_s=kv_row / (gpus * bytes_per_s) / e_mem,
    )
    lora_fixed_s, lora_row_s = _line(table["lora_us"])
    lora = StageTime(
        fixed_s=lora_fixed_s, per_row_s=lora_row_s * _row_adapter_bytes(shape) / _row_adapter_bytes(table)
    )
    fixed_s = per_row_s = 0.0
    for name, widths in (("recv_us", _row_inputs), ("send_us", _row_outputs)):
        stage_fixed_s, stage_row_s = _line(table[name])
        fixed_s += stage_fixed_s
        per_row_s += stage_row_s * widths(shape) / widths(table) * table["instance_gpus"] / gpus
    return Stages(attention, experts, lora, StageTime(fixed_s=fixed_s, per_row_s=per_row_s))


def _line(micros: list[float]) -> tuple[float, float]:
    """Intercept and slope in s through the values at 128 and 256 rows."""
    per_row_us = (micros[1] - micros[0]) / 128
    return (micros[0] - 128 * per_row_us) * US, per_row_us * US


def _longer(stage: StageTime, factor: float) -> StageTime:
    return StageTime(**{name: factor * value for name, value in vars(stage).items()})


def _expert_bytes(shape: dict[str, Any]) -> float:
    """bf16 weights of a layer's experts."""
    return 6.0 * shape["num_experts"] * shape["hidden_size"] * shape["intermediate_size"]


def _row_flop(shape: dict[str, Any]) -> float:
    return 6.0 * shape["num_experts_per_token"] * shape["hidden_size"] * shape["intermediate_size"]


def _row_adapter_bytes(shape: dict[str, Any]) -> float:
    """Adapter bytes of the experts that one row chooses."""
    width = shape["hidden_size"] + shape["intermediate_size"]
    return 6.0 * shape["num_experts_per_token"] * width * shape["lora_rank"]


def _row_inputs(shape: dict[str, Any]) -> float:
    """Values sent for a row: inputs of gate/up and of down per chosen expert."""
    return float(shape["num_experts_per_token"] * (shape["hidden_size"] + shape["intermediate_size"]))


def _row_outputs(shape: dict[str, Any]) -> float:
    return float(shape["num_experts_per_token"] * (shape["hidden_size"] + 2 * shape["intermediate_size"]))
