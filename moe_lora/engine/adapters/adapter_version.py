"""One version of an adapter, as the engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.lora.row_routing import Lease


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    uid: its namespace in the cache.  num_running: requests that hold it, those that wait for its bytes
    included.  num_waiting: requests that don't yet.  slot: while it is ready on this device.  lease: while
    the LoRA Server holds it for this engine.
    """

    uid: int
    version: int
    packed: PackedAdapter
    path: str | None
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float | None = None
    retired: bool = False
    pinned: bool = False
    slot: int | None = None
    lease: Lease | None = None

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def is_idle(self) -> bool:
        """No request holds it or waits for it."""
        return not (self.num_running or self.num_waiting)
