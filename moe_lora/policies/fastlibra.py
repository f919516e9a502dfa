"""FastLibra's cost model of what to keep on the device, and its ablations.

Source: FastLibra, sections 5.1, 5.2 (equations 3 to 6) and 6.6 to 6.8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .caching import CacheCosts, CacheLoad, Floats, NodeColumns, Traits

MAX_EXPONENT = 700.0
"""Above it exp overflows; so long unused, a node's value is as good as zero."""


def required_adapters(load: CacheLoad) -> float:
    """Low_lora = sum over adapters of 1 - (1 - prob_i)^BS, prob_i = visits_i / queries (equation 3)."""
    probability = np.minimum(load.adapter_visits / load.num_queries, 1.0)
    return float((1 - (1 - probability) ** load.batch_size).sum())


def adapter_reward(load: CacheLoad) -> float:
    """LoRA_Eval = max(1, Low_lora / Now_lora) (equation 4), with at least one adapter counted as there."""
    return max(1.0, required_adapters(load) / max(1, load.num_adapters))


@dataclass(frozen=True, kw_only=True)
class FastLibra:
    """Eval_i = LoRA_Eval_i x cost_i x prob_i x (1 - sigmoid(t_i / time_unit_s)) (equations 5 and 6).

    cost: seconds to copy the node from the host; prob: its visits per query since it was made, not decayed;
    t: time since its last use.  LoRA_Eval multiplies adapters only and is 1 for KV: a factor common to all
    would leave the order as it is.  rewards_adapters False: FastLibra-WOL.  keeps_dependencies False:
    FastLibra-WOM.  The paper does not say in what unit t is.
    """

    costs: CacheCosts
    time_unit_s: float = 60.0
    rewards_adapters: bool = True
    keeps_dependencies: bool = True
    adapter_recent_s: float = 60.0

    @property
    def traits(self) -> Traits:
        return Traits(keeps_dependencies=self.keeps_dependencies)

    def values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        probability = np.minimum(nodes.visits / load.num_queries, 1.0)
        decay = 1 / (1 + np.exp(np.minimum(nodes.idle_s / self.time_unit_s, MAX_EXPONENT)))
        values = self.costs.move_s(nodes.pages) * probability * decay
        if self.rewards_adapters:
            values[nodes.is_adapter] *= adapter_reward(load)
        return values

    def host_values(self, nodes: NodeColumns, load: CacheLoad) -> Floats:
        return self.values(nodes, load)

    def worth_loading(self, first_token: int, num_tokens: int, num_pages: int) -> bool:
        return True
