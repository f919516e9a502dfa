"""Nodes as rows of arrays, so that a decision over all of them is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching import NodeColumns

from .node import Node

_COLUMNS = {
    "is_adapter": np.bool_,
    "pages": np.int64,
    "visits": np.float64,
    "recent": np.float64,
    "last_used_s": np.float64,
    "first_token": np.int64,
    "num_tokens": np.int64,
    "wanted": np.int64,
    "adapter_row": np.int64,
    "ready": np.bool_,
    "backed": np.bool_,
    "has_device_pages": np.bool_,
    "can_leave": np.bool_,
    "can_enter": np.bool_,
    "can_leave_host": np.bool_,
    "can_back_up": np.bool_,
}


class Columns:
    """One row per node; rows of removed nodes are used again.

    backed: the host has it.  ready: it can be used on the device or, of an adapter without pages here, on the
    LoRA Server.  can_leave: device leaves without pins.  can_enter: host roots.  can_leave_host: nodes whose
    host pages nobody depends on.  can_back_up: idle KV of the device that the host has not.  recent_s: time
    constant of the decayed visits.
    """

    is_adapter: NDArray[np.bool_]
    pages: NDArray[np.int64]
    visits: NDArray[np.float64]
    recent: NDArray[np.float64]
    last_used_s: NDArray[np.float64]
    first_token: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    wanted: NDArray[np.int64]
    adapter_row: NDArray[np.int64]
    ready: NDArray[np.bool_]
    backed: NDArray[np.bool_]
    has_device_pages: NDArray[np.bool_]
    can_leave: NDArray[np.bool_]
    can_enter: NDArray[np.bool_]
    can_leave_host: NDArray[np.bool_]
    can_back_up: NDArray[np.bool_]

    def __init__(self, recent_s: float) -> None:
        self.recent_s = recent_s
        self.nodes: list[Node | None] = []
        self._vacant: list[int] = []
        self._capacity = 1024
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(self._capacity, dtype=dtype))

    def __len__(self) -> int:
        """Rows in use, vacant ones between them included."""
        return len(self.nodes)

    def new_row(self) -> int:
        """A row of zeros; the caller puts its node into `nodes`."""
        if self._vacant:
            return self._vacant.pop()
        self.nodes.append(None)
        if len(self.nodes) > self._capacity:
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            self._capacity *= 2
        return len(self.nodes) - 1

    def give_back(self, row: int) -> None:
        """The row's node is removed."""
        self.nodes[row] = None
        for name in _COLUMNS:
            getattr(self, name)[row] = 0
        self._vacant.append(row)

    def copy_statistics(self, source: int, target: int) -> None:
        """The target has been used as often and as lately as the source."""
        for column in (self.visits, self.recent, self.last_used_s, self.wanted):
            column[target] = column[source]

    def visit(self, nodes: Sequence[Node], now_s: float) -> None:
        """Each of the nodes was used once."""
        rows = [node.row for node in nodes]
        self.recent[rows] *= np.exp((self.last_used_s[rows] - now_s) / self.recent_s)
        self.recent[rows] += 1
        self.visits[rows] += 1
        self.last_used_s[rows] = now_s

    def where(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Rows for which one of the masks holds."""
        return np.flatnonzero(mask[: len(self.nodes)])

    def view(self, rows: NDArray[np.int64], now_s: float) -> NodeColumns:
        """What a policy sees of these rows."""
        return NodeColumns(
            is_adapter=self.is_adapter[rows],
            pages=self.pages[rows],
            visits=self.visits[rows],
            recent=self.recent[rows],
            idle_s=now_s - self.last_used_s[rows],
            backed=self.backed[rows],
            first_token=self.first_token[rows],
            num_tokens=self.num_tokens[rows],
            wanted=self.wanted[rows],
            adapter_ready=self.ready[self.adapter_row[rows]],
        )
