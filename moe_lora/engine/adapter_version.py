"""One version of an adapter, as the engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.request import AdapterInfo


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.  `uid` is its prefix-cache namespace; slot and extents while resident."""

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

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def num_pages(self) -> int:
        """Pages of its extents, 0 while it is not resident."""
        return sum(num_pages for _, num_pages in self.extents)

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            name=self.name,
            version=self.version,
            lora_rank=self.packed.max_lora_rank,
            nbytes=self.packed.nbytes,
            targets=self.packed.targets,
            path=self.path,
            residency="host" if self.slot is None else "device",
            num_running=self.num_running,
            num_waiting=self.num_waiting,
        )
