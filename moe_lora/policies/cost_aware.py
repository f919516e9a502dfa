"""This project's policy: time saved per page and second, from all that is known about the next requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .caching import Amount, CacheCosts, CacheLoad, Floats, NodeColumns, Traits


@dataclass(frozen=True, kw_only=True)
class CostAware:
    """value = uses per second x seconds that a request loses without the node / pages.

    Uses: what nodes of its kind brought after being idle for so long (`policies.reuse`): a dialogue goes on
    after a while or not at all, an adapter or a shared prefix is used at its own rate; nothing of an adapter
    never used.  And one more within queue_s for each queued request that needs the node.
    Seconds, on the device: copying it from the host (or loading an adapter's files); KV is computed anew
    where the host has it not or that is faster, and the deeper in a prompt the slower, since its tokens
    attend to all before them.  Computing counts 1 + behind_per_s times its length, since requests queue
    behind it: of a device that is busy for a share u of its time, arrivals_per_s / (1 - u) per second
    (M/G/1: the wait goes with the mean square of the work).  So few long prompts are worth more than many
    short ones of as many pages.  And wait_s, the step that begins without the request: all of it for an
    adapter, of KV the part that it has of its prefix, since whatever is missing makes the request wait, once.
    KV of an adapter that is not ready counts unready_share of its bytes' time: its request waits for the
    adapter meanwhile anyway.
    Seconds, on the host: what computing or loading takes longer than copying.

    Besides (`traits`): the least valued history of the device is on the host before its room is needed, and
    what is worth more than something on the device takes its place ahead of need.
    behind_per_s: by default that of 6 requests/s at u = 0.8.
    adapter_recent_s: time constant of `NodeColumns.recent`, by which adapters are told apart.
    """

    costs: CacheCosts
    adapter_recent_s: float = 120.0
    queue_s: float = 2.0
    unready_share: float = 0.5
    behind_per_s: float = 30.0

    @property
    def traits(self) -> Traits:
        return Traits(
            backs_up=True,
            looks_ahead=True,
            learns_reuse=True,
            exchanges=True,
            values_per_page=True,
            drops_backed_first=False,
        )

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        wait_s, move_s = self.costs.wait_s, self.costs.move_s(nodes.pages)
        load_s = np.where(nodes.backed, move_s, self.costs.load_s(nodes.pages))
        compute_s = self._compute_s(nodes.first_token, nodes.num_tokens)
        history_s = np.where(nodes.backed, np.minimum(move_s, compute_s), compute_s)
        history_s *= np.where(nodes.adapter_ready, 1.0, self.unready_share)
        share = nodes.num_tokens / np.maximum(nodes.first_token + nodes.num_tokens, 1)
        lost_s = np.where(nodes.is_adapter, load_s + wait_s, history_s + share * wait_s)
        return self._uses_per_s(nodes, load) * lost_s / np.maximum(nodes.pages, 1)

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        compute_s = self._compute_s(nodes.first_token, nodes.num_tokens)
        otherwise_s = np.where(nodes.is_adapter, self.costs.load_s(nodes.pages), compute_s)
        saved_s = np.maximum(otherwise_s - self.costs.move_s(nodes.pages), 0.0)
        return self._uses_per_s(nodes, load) * saved_s / np.maximum(nodes.pages, 1)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return self.costs.move_s(num_pages) < self._compute_s(first_token, num_tokens)

    def _compute_s(self, first_token: Amount, num_tokens: Amount) -> Amount:
        """Seconds that requests lose by computing KV anew, those behind it included."""
        alone_s = self.costs.recompute_s(first_token, num_tokens)
        return alone_s * (1 + self.behind_per_s * alone_s)

    def _uses_per_s(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        uses = np.where(nodes.is_adapter, nodes.recent, np.maximum(nodes.visits, nodes.turn))
        depth = nodes.first_token + nodes.num_tokens
        learned = np.where(uses > 0, load.reuse.of(uses, depth, nodes.idle_s), 0.0)
        return learned + nodes.wanted / self.queue_s
