"""Caching policies by the names users give."""

from __future__ import annotations

from collections.abc import Callable

from .caching import CacheCosts, CachingPolicy
from .cost_aware import CostAware
from .fastlibra import FastLibra
from .recency import fastlibra_wos, lru, slora, static_partition

CACHING_POLICIES: dict[str, Callable[[CacheCosts], CachingPolicy]] = {
    "cost-aware": lambda costs: CostAware(costs=costs),
    "fastlibra": lambda costs: FastLibra(costs=costs),
    "fastlibra-wom": lambda costs: FastLibra(costs=costs, keeps_dependencies=False),
    "fastlibra-wos": lambda costs: fastlibra_wos(),
    "fastlibra-wol": lambda costs: FastLibra(costs=costs, rewards_adapters=False),
    "lru": lambda costs: lru(),
    "static": lambda costs: static_partition(),
    "slora": lambda costs: slora(),
}


def make_caching_policy(name: str, costs: CacheCosts) -> CachingPolicy:
    """The policy of that name at its defaults.  Raises ValueError for an unknown one."""
    if name not in CACHING_POLICIES:
        raise ValueError(f"cache policy {name!r} is unknown; choose one of {', '.join(CACHING_POLICIES)}")
    return CACHING_POLICIES[name](costs)
