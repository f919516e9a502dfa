"""The best shares on the servers that hold an adapter anyway: nothing is copied."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from .placement_problem import PlacementProblem, Shares
from .placement_quality import padded_of, tokens_by_rank

_LEAST_SHARE = 1e-9


def even_out(problem: PlacementProblem, shares: Shares, *, padded: bool) -> Shares:
    """Shares of the same adapters on the same servers with the least worst load.

    A linear program over the adapters that are on several servers: minimise T subject to each server's load
    <= T, sum of an adapter's shares = 1.  padded: servers count at the highest rank that they serve now.
    """
    split = [a for a, row in shares.items() if len(row) > 1 and problem.demand[a] > 0]
    if not split:
        return shares
    per_token = _seconds_per_token(problem, shares, padded=padded)
    column_of = {rank: column for column, rank in enumerate(problem.tokens_per_s)}
    fixed = np.zeros(len(problem.servers))
    for adapter, row in shares.items():
        if len(row) == 1:
            server = next(iter(row))
            fixed[server] += (
                problem.demand[adapter] * per_token[server, column_of[int(problem.ranks[adapter])]]
            )
    pairs = [(place, a, server) for place, a in enumerate(split) for server in sorted(shares[a])]
    load = [problem.demand[a] * per_token[s, column_of[int(problem.ranks[a])]] for _, a, s in pairs]
    unit = max(problem.target_utilisation, 1e-300)
    columns = np.arange(len(pairs))
    servers = np.array([server for _, _, server in pairs])
    every = np.arange(len(fixed))
    on_server = coo_matrix(
        (
            np.concatenate([np.array(load) / unit, -np.ones(len(fixed))]),
            (np.concatenate([servers, every]), np.concatenate([columns, np.full(len(fixed), len(pairs))])),
        )
    )
    rows = [place for place, _, _ in pairs]
    of_adapter = coo_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(split), len(pairs) + 1))
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, on_server, -fixed / unit, of_adapter, np.ones(len(split)), bounds=(0, None))
    if found.status != 0:  # can't be: the shares as they are are a solution
        raise RuntimeError(f"the shares could not be evened out: {found.message}")
    apart = set(split)
    evened = {adapter: row for adapter, row in shares.items() if adapter not in apart}
    for (_, adapter, server), share in zip(pairs, found.x[:-1], strict=True):
        if share > _LEAST_SHARE:
            evened.setdefault(adapter, {})[server] = float(share)
    return evened


def _seconds_per_token(problem: PlacementProblem, shares: Shares, *, padded: bool) -> np.ndarray:
    """[S, ranks that occur]: what a token of an adapter costs on a server."""
    own = 1.0 / np.array(list(problem.tokens_per_s.values()))
    if not padded:
        return np.tile(own, (len(problem.servers), 1))
    tokens = tokens_by_rank(problem, shares)
    total = np.maximum(tokens.sum(axis=1), 1e-300)
    padded_cost = np.where(tokens.sum(axis=1) > 0, padded_of(problem, tokens) / total, own[0])
    return np.tile(padded_cost[:, None], (1, len(own)))
