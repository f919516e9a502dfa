"""Which rows of a step belong to which leased adapter.

Legend: T token rows of the step, A adapters in use.
"""

from __future__ import annotations

import numpy as np

from moe_lora.core.shape import ModelShape
from moe_lora.lora.row_routing import RowRouting, Source


class RemoteRows:
    """One step's rows at one group of sites as the remote backend asks for them.

    adapter: [T] index into `RowRouting.adapters`, -1 = not leased.  slot: [T] int32 server slot, -1 where the
    row is not leased or its lease was lost.  generation: [T] int64.
    """

    def __init__(self, routing: RowRouting, group: int, shape: ModelShape) -> None:
        terms = routing.terms_from(Source.LEASED, group)
        self.adapter, self.slot, self.generation = terms["adapter"], terms["slot"], terms["generation"]
        self._adapters = routing.adapters
        self._sites = shape.sites
        self._tokens: dict[int, np.ndarray] = {}

    def tokens_at(self, site: int) -> np.ndarray:
        """Token rows whose adapter has deltas at this site, ascending."""
        known = self._tokens.get(site)
        if known is None:
            modules = set(self._sites[site].modules)
            targeted = [not modules.isdisjoint(adapter.targets) for adapter in self._adapters]
            known = np.flatnonzero(np.array([*targeted, False])[self.adapter])
            self._tokens[site] = known
        return known
