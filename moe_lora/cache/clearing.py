"""Clears a run of device pages for an adapter, saving to the host first what would be lost."""

from __future__ import annotations

import numpy as np

from .host_room import take_host
from .node import Node
from .ranking import Ranking
from .tier import PRIVATE
from .windows import blocked_rows, cheapest_window, clear_window, idle_pages


class Clearing:
    """Makes room for runs that no gap is long enough for.

    saves: KV in the chosen window that the host has not is copied there first, once per attempt: until that
    is done the answer is None, and the caller asks again.
    """

    def __init__(self, ranking: Ranking, *, saves: bool) -> None:
        self._ranking = ranking
        self._residence = ranking.residence
        self._saves = saves
        self._saving: dict[Node, tuple[int, list[Node]]] = {}

    def take_runs(self, adapter: Node, now_s: float) -> list[int] | None:
        """A run of device pages per layer: side by side if some window of them all can be cleared, else each
        by itself; None if not (yet).
        """
        assert adapter.layer_pages is not None
        device, num_pages = self._residence.device, adapter.num_pages
        saving = self._saving.get(adapter)
        if saving is not None and any(node.moving_out for node in saving[1]):
            return None
        if not self._can_clear(num_pages):
            return None
        if saving is not None and self._is_free_of_blocked(saving[0], num_pages):
            first: int | None = saving[0]
        else:
            first = cheapest_window(self._ranking, num_pages, now_s)
        if first is None:
            return self._take_separate_runs(adapter, now_s)
        if saving is None and self._saves and self._save(adapter, first, now_s):
            return None
        self._saving.pop(adapter, None)
        clear_window(self._ranking, first, num_pages)
        return device.take_runs(adapter.layer_pages, adapter.row)

    def _can_clear(self, num_pages: int) -> bool:
        """Whether that many pages are free or could be, wherever they lie."""
        return self._residence.device.num_free + idle_pages(self._ranking) >= num_pages

    def _is_free_of_blocked(self, first: int, num_pages: int) -> bool:
        owner = self._residence.device.owner[first : first + num_pages]
        return not ((owner == PRIVATE).any() or blocked_rows(self._ranking)[owner[owner >= 0]].any())

    def _save(self, adapter: Node, first: int, now_s: float) -> bool:
        """Order copies of what only the device has in the window, and below it; False if there are none."""
        self._saving = {node: saving for node, saving in self._saving.items() if not node.gone}
        tree, nodes = self._residence.tree, self._ranking.columns.nodes
        owner = self._residence.device.owner[first : first + adapter.num_pages]
        inside = [node for row in np.unique(owner[owner >= 0]).tolist() if (node := nodes[row])]
        saved = []
        for node in dict.fromkeys(lower for top in inside for lower in tree.bottom_up(top)):
            if node.is_adapter or node.dying or node.device_pages is None or node.host_pages is not None:
                continue
            pages = take_host(self._ranking, node, now_s)
            if pages is None:
                break
            self._residence.send_out(node, pages, leaves=False)
            saved.append(node)
        if saved:
            self._saving[adapter] = first, saved
        return bool(saved)

    def _take_separate_runs(self, node: Node, now_s: float) -> list[int] | None:
        """A run for each layer by itself, clearing a window for each that finds none.

        They have no row for an owner until all are there, so that no window for a later one takes them.
        """
        assert node.layer_pages is not None
        device = self._residence.device
        pages: list[int] = []
        for length in filter(None, node.layer_pages):
            run = device.take_runs([length], PRIVATE)
            if run is None:
                first = cheapest_window(self._ranking, length, now_s)
                if first is not None:
                    clear_window(self._ranking, first, length)
                    run = device.take_runs([length], PRIVATE)
            if run is None:
                device.give_back(pages, is_adapter=True)
                return None
            pages += run
        device.hand_over(pages, node.row)
        return pages
