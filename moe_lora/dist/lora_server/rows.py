"""Which rows of a step belong to which leased adapter.

Legend: T token rows of the step, A adapters in use.
"""

from __future__ import annotations

import numpy as np

from moe_lora.core.shape import ModelShape
from moe_lora.kernels.step import LeasedRows


class RemoteRows:
    """One step's rows as the remote backend asks for them.

    adapter: [T] int32 index into `adapters`, -1 = base.  slot: [T] int32 server slot, -1 where the row has no
    adapter or its lease was lost.  generation: [T] int64.
    """

    def __init__(self, leased: LeasedRows, shape: ModelShape) -> None:
        self.adapters = leased.adapters
        self.adapter = leased.row_adapter
        leases = [adapter.lease for adapter in self.adapters]
        slots = np.array([-1 if lease is None else lease.slot for lease in leases] + [-1], dtype=np.int32)
        generations = np.array([0 if lease is None else lease.generation for lease in leases] + [0])
        self.slot = slots[self.adapter]
        self.generation = generations[self.adapter]
        self._targets = [
            [not set(adapter.packed.targets).isdisjoint(site.modules) for adapter in self.adapters] + [False]
            for site in shape.sites
        ]
        self._tokens: dict[int, np.ndarray] = {}

    def tokens_at(self, site: int) -> np.ndarray:
        """Token rows whose adapter has deltas at this site, ascending."""
        known = self._tokens.get(site)
        if known is None:
            known = np.flatnonzero(np.array(self._targets[site])[self.adapter])
            self._tokens[site] = known
        return known
