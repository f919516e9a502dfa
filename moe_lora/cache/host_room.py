"""Host pages for what leaves the device."""

from __future__ import annotations

from .node import Node
from .ranking import Kind, Ranking


def take_host(ranking: Ranking, node: Node, now_s: float) -> list[int] | None:
    """Host pages for a node, at the cost of nodes that the device has too, then of the least valued; None if
    that is not enough.
    """
    host = ranking.residence.host
    if node.num_pages > host.num_pages:
        return None
    while host.num_free < node.num_pages:
        victim = ranking.victim(Kind.HOST, now_s)
        if victim is None:
            return None
        ranking.residence.drop_host(victim)
    return host.take(node.num_pages, node.row, is_adapter=node.is_adapter)
