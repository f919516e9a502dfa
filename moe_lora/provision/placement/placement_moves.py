"""Which server takes which part of a new placement, so that least is copied."""

from __future__ import annotations

from collections.abc import KeysView

import numpy as np
from scipy.optimize import linear_sum_assignment

from .placement_problem import PlacementProblem, Shares

_SHARE_WEIGHT = 1e-3
"""Of two ways to copy equally little, the one that changes phi less."""


def least_moves(problem: PlacementProblem, shares: Shares, before: Shares) -> Shares:
    """The same placement under the permutation of servers that keeps most bytes where they were.

    An assignment problem over kept[i, j]: bytes of the adapters of part i that server j had.  Then adapters
    equal in rank and demand, which the paper does not mention, change places among each other if that leaves
    more of them where they were.  Source: LoRAServe, Algorithm 1, step 5.
    """
    if not before:
        return shares
    num_servers = len(problem.servers)
    kept = np.zeros((num_servers, num_servers))
    for adapter, row in shares.items():
        had = before.get(adapter)
        if had:
            for part, share in row.items():
                for server, phi in had.items():
                    kept[part, server] += problem.nbytes[adapter] * (1 + _SHARE_WEIGHT * min(share, phi))
    # Equal sums must be equal floats, or rounding would prefer one of two equal permutations to staying.
    kept = np.round(kept / max(kept.max(), 1e-300), 9)
    _, server_of = linear_sum_assignment(kept, maximize=True)
    moved = {
        adapter: {int(server_of[part]): share for part, share in row.items()}
        for adapter, row in shares.items()
    }
    return _swap_equal(problem, moved, before)


def _swap_equal(problem: PlacementProblem, shares: Shares, before: Shares) -> Shares:
    """Of equal adapters, each takes a row on the servers that it had, its own first, if there is one."""
    equal: dict[tuple[int, float], list[int]] = {}
    for adapter in shares:
        equal.setdefault((int(problem.ranks[adapter]), float(problem.demand[adapter])), []).append(adapter)
    found: Shares = {}
    for adapters in equal.values():
        apart = [adapter for adapter in sorted(adapters) if shares[adapter].keys() != _had(before, adapter)]
        found.update((adapter, shares[adapter]) for adapter in adapters)
        rows: dict[frozenset[int], list[int]] = {}
        for adapter in reversed(apart):
            rows.setdefault(frozenset(shares[adapter]), []).append(adapter)
        rest = []
        for adapter in apart:
            wanted = rows.get(frozenset(_had(before, adapter)))
            if wanted:
                found[adapter] = shares[wanted.pop()]
            else:
                rest.append(adapter)
        left = sorted(adapter for row in rows.values() for adapter in row)
        found.update((adapter, shares[row]) for adapter, row in zip(rest, left, strict=True))
    return found


def _had(before: Shares, adapter: int) -> KeysView[int]:
    return before.get(adapter, {}).keys()


def copied_bytes(problem: PlacementProblem, shares: Shares, before: Shares) -> float:
    """Bytes of adapters on servers that did not have them; those that were nowhere before do not count."""
    return sum(
        float(problem.nbytes[adapter])
        for adapter, row in shares.items()
        if adapter in before
        for server in row
        if server not in before[adapter]
    )


def num_copies(shares: Shares, before: Shares) -> int:
    """Adapters times servers that get them from another server."""
    return sum(server not in before[a] for a, row in shares.items() if a in before for server in row)
