"""One version of an adapter, as the engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.request import AdapterInfo, AdapterResidency
from moe_lora.kernels.step import Lease


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    uid: its prefix-cache namespace.  slot, extents: while it is resident on this device.  lease: while the
    LoRA Server holds it for this engine.
    """

    uid: int
    version: int
    packed: PackedAdapter
    path: str | None
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float = 0.0
    retired: bool = False
    slot: int | None = None
    extents: list[tuple[int, int]] = field(default_factory=list)
    lease: Lease | None = None

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def num_pages(self) -> int:
        """Pages of its extents, 0 while it is not resident."""
        return sum(num_pages for _, num_pages in self.extents)

    @property
    def residency(self) -> AdapterResidency:
        """Where its bytes are ready for computing; "host" where they are not."""
        if self.lease is not None:
            return "remote"
        return "host" if self.slot is None else "device"

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            name=self.name,
            version=self.version,
            lora_rank=self.packed.max_lora_rank,
            nbytes=self.packed.nbytes,
            targets=self.packed.targets,
            path=self.path,
            residency=self.residency,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
        )
