"""Routers that look at the number of requests, at chance, or at where an adapter was last."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .routing import Instance, LeastOutstanding, RoutedView


class RandomChoice:
    """Any instance, each as likely.  seed: equal seeds choose alike."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return instances[self._rng.randrange(len(instances))]


class JoinShortestQueue:
    """The instance with the fewest requests that have not ended, the first of several."""

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=lambda one: (one.load.num_requests, one.index))


class FirstFit:
    """The first instance with fewer than max_requests; where all are full, the one with the fewest.

    Requests are packed on few instances, so that others may be idle.  Source: Toppings section 7.4.
    """

    def __init__(self, max_requests: int) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests} must be 1 or more")
        self._max_requests = max_requests
        self._otherwise = JoinShortestQueue()

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        fitting = (one for one in instances if one.load.num_requests < self._max_requests)
        found = next(fitting, None)
        return self._otherwise.choose(request, instances) if found is None else found


class AdapterAffinity:
    """Where the adapter is, or requests for it wait, as long as that is not much busier than elsewhere.

    Of the instances that have it the one with the least token work, if that is at most
    (1 + max_imbalance) · the least of all + slack_tokens; else the one with the least of all.
    """

    def __init__(self, max_imbalance: float = 0.5, slack_tokens: int = 2048) -> None:
        if not (max_imbalance >= 0 and slack_tokens >= 0):
            raise ValueError(f"max_imbalance={max_imbalance}, slack_tokens={slack_tokens} must be 0 or more")
        self._max_imbalance = max_imbalance
        self._slack_tokens = slack_tokens
        self._otherwise = LeastOutstanding()

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        idlest = self._otherwise.choose(request, instances)
        having = [one for one in instances if one.load.has(request.adapter)]
        if not having:
            return idlest
        chosen = self._otherwise.choose(request, having)
        limit = (1 + self._max_imbalance) * idlest.outstanding_tokens + self._slack_tokens
        return chosen if chosen.outstanding_tokens <= limit else idlest
