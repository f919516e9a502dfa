# SPDX-License-Identifier: Apache-2.0
"""A cluster of known size."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.core.partition import Layout


@dataclass(frozen=True)
class SizedCluster:
    """num_instances instances beside a LoRA Server of `layout`, or coupled: `slots` adapters on each."""

    layout: Layout | None
    num_instances: int
    slots: int = 0

    def num_gpus(self, instance_gpus: int) -> int:
        """Total GPUs."""
        return self.num_instances * instance_gpus + (self.layout.num_ranks if self.layout else 0)

    def __str__(self) -> str:
        beside = f"{self.slots} adapters beside the weights" if self.layout is None else str(self.layout)
        return f"{self.num_instances} instances and {beside}"
