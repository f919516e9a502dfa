# SPDX-License-Identifier: Apache-2.0
"""Migration problems of any size with unevenly loaded replicas."""

from __future__ import annotations

import math

import numpy as np

from moe_lora.policies.migration.problem import AdapterSize, MigrationProblem, ReplicaView, RequestView

SWAP_BYTES_PER_S = 200.0


def uneven_problem(
    num_replicas: int,
    seed: int,
    *,
    requests_per_replica: int = 8,
    num_adapters: int | None = None,
    skew: float = 1.0,
    device_bytes: float = 400.0,
    affinity_s: float = 0.05,
) -> MigrationProblem:
    """Adapters by Zipf; popular adapters are on more replicas, and replicas differ by remainders and answer
    lengths.

    num_adapters: 4 a replica by default.  Half of the requests wait, at no cost of moving; moving another
    adds 2 to 20 %.  A request has 4 to 40 bytes, an adapter 5 to 20; host memory suffices.
    """
    rng = np.random.default_rng(seed)
    num = num_adapters or 4 * num_replicas
    names = [f"lora-{k}" for k in range(num)]
    shares = np.arange(1, num + 1.0) ** -skew
    shares /= shares.sum()
    num_homes = [min(num_replicas, math.ceil(share * num_replicas)) for share in shares]
    homes = [rng.choice(num_replicas, count, replace=False) for count in num_homes]
    lengths_s = rng.gamma(2.0, 1.0, num)
    requests = []
    for i, k in enumerate(rng.choice(num, requests_per_replica * num_replicas, p=shares).tolist()):
        factor = 1.0 if rng.random() < 0.5 else 1.0 + float(rng.uniform(0.02, 0.2))
        home, num_bytes = int(rng.choice(homes[k])), float(rng.integers(4, 41))
        requests.append(RequestView(i, names[k], home, num_bytes, float(lengths_s[k]), factor))
    held: list[set[str]] = [set() for _ in range(num_replicas)]
    for name, places in zip(names, homes, strict=True):
        for j in places.tolist():
            held[j].add(name)
    replicas = [ReplicaView(j, device_bytes, adapters=frozenset(held[j])) for j in range(num_replicas)]
    sizes = [AdapterSize(name, float(rng.integers(5, 21))) for name in names]
    return MigrationProblem(replicas, requests, sizes, SWAP_BYTES_PER_S, affinity_s)
