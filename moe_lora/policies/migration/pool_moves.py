# SPDX-License-Identifier: Apache-2.0
"""Holders of a pool's adapters in host memory, and droppable copies.

Copies are confirmed, routing switches, then old copies are dropped (LoRAServe section IV-B).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=str)
Holders = Mapping[Key, Collection[int]]

UNEVEN = 0.1
"""Without a placement, adapters move only above this imbalance, relative to the mean."""


def place_holders(
    sizes: Mapping[Key, int],
    held: Holders,
    live: Sequence[int],
    replicas: int,
    wanted: Holders | None = None,
) -> dict[Key, frozenset[int]]:
    """Holders of each adapter: live wanted holders, and as many as `replicas` needs.

    wanted: by a placement; other adapters stay or go where the fewest bytes are.
    """
    load = dict.fromkeys(live, 0)
    holders: dict[Key, set[int]] = {}
    fixed: dict[Key, set[int]] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        fixed[key] = set(() if wanted is None else wanted.get(key, ())) & load.keys()
        holders[key] = set(fixed[key])
        now = held.get(key, ())
        others = sorted(load.keys() - holders[key], key=lambda one: (one not in now, load[one], one))
        holders[key].update(others[: max(0, replicas - len(holders[key]))])
        for instance in holders[key]:
            load[instance] += sizes[key]
    _even_out(sizes, load, holders, fixed)
    return {key: frozenset(instances) for key, instances in holders.items()}


def _even_out(
    sizes: Mapping[Key, int], load: dict[int, int], holders: dict[Key, set[int]], fixed: dict[Key, set[int]]
) -> None:
    """Move adapters from the fullest instance to the emptiest."""
    movable: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)
    for key in sorted(holders, key=lambda key: (sizes[key], key)):
        for instance in holders[key] - fixed[key]:
            movable[instance].append((sizes[key], key))
    while len(load) > 1:
        full, empty = (pick(load, key=lambda one: (load[one], one)) for pick in (max, min))
        gap = load[full] - load[empty]
        if gap <= UNEVEN * sum(load.values()) / len(load):
            return
        fitting = bisect_right(movable[full], gap // 2, key=lambda one: one[0])
        for place in reversed(range(fitting)):
            size, key = movable[full][place]
            if size and empty not in holders[key]:
                break
        else:
            return
        del movable[full][place]
        insort(movable[empty], (size, key))
        holders[key] = holders[key] - {full} | {empty}
        load[full] -= sizes[key]
        load[empty] += sizes[key]


def copies_to_make(target: Mapping[Key, frozenset[int]], held: Holders) -> list[tuple[Key, int]]:
    """(adapter, target instance without it), adapters without any holder first."""
    missing = [
        (key, instance)
        for key, instances in target.items()
        for instance in sorted(instances - set(held.get(key, ())))
    ]
    return sorted(missing, key=lambda move: bool(held.get(move[0])))


def copies_to_drop(target: Mapping[Key, frozenset[int]], held: Holders) -> list[tuple[Key, int]]:
    """(adapter, instance that may drop it), if all target holders have it."""
    return [
        (key, instance)
        for key, instances in target.items()
        if instances and instances <= set(held.get(key, ()))
        for instance in sorted(set(held[key]) - instances)
    ]
