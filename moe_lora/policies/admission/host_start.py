# SPDX-License-Identifier: Apache-2.0
"""Prompts on host workers during their adapters' loads.  Source: Toppings sections 4.1 and 4.2."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from moe_lora.core.errors import ConfigError
from moe_lora.timing.host_times import ColdAdapter, HostTimes

_LONGEST_PROMPT = 1 << 17


@dataclass(frozen=True, kw_only=True)
class HostStart:
    """Start of a prompt on host workers.

    tokens_per_worker: largest piece of rows.  Host and device overlap; the slower counts.
    """

    times: HostTimes
    num_workers: int
    tokens_per_worker: int
    tpot_budget_s: float | None = None

    def tokens_per_step(self, max_tokens: int) -> int:
        """Most prompt rows on the host in a step with other requests: a piece per worker, or as many as fit
        tpot_budget_s over all layers at the largest measured rank.

        Raises ConfigError if a single row exceeds the budget.
        """
        if self.tpot_budget_s is None:
            return self.num_workers * self.tokens_per_worker
        adapter = self.times.adapter(self.times.max_rank)
        layer_s = self.tpot_budget_s / self.times.num_layers
        for num_tokens in range(1, max_tokens + 1):
            if self.layer_s(num_tokens, adapter) > layer_s:
                break
        else:
            return max_tokens
        if num_tokens == 1:
            least_s = self.times.num_layers * self.layer_s(1, adapter)
            raise ConfigError(
                f"host_tpot_budget_ms={1e3 * self.tpot_budget_s:g}: by the performance model a step with one "
                f"row on the host takes {1e3 * least_s:.3g}; give more than that, or host_workers=0"
            )
        return num_tokens - 1

    def layer_s(self, num_tokens: int, adapter: ColdAdapter) -> float:
        host_s = 0.0
        if num_tokens:
            num_pieces = math.ceil(num_tokens / self.tokens_per_worker)
            in_turn = math.ceil(num_pieces / self.num_workers)
            host_s = in_turn * self.times.worker_s(math.ceil(num_tokens / num_pieces), adapter)
        return max(host_s, self.times.device.seconds(num_tokens, adapter.lora_rank))

    def first_group(self, num_tokens: int, adapter: ColdAdapter, ahead_s: float = 0.0) -> int:
        """Fewest layers on the host such that later layers are loaded by their turn.

        ahead_s: until the load starts.
        """
        times, num_layers = self.times, self.times.num_layers
        load_s = times.load_s(adapter) / num_layers
        host_s = self.layer_s(num_tokens, adapter)
        device_s = times.device.seconds(num_tokens, adapter.lora_rank)
        if load_s <= device_s:  # layer by layer the device falls behind the load
            needed = (ahead_s + load_s) / host_s if host_s else 1.0
        else:  # the last layer comes last
            total_s = ahead_s + num_layers * load_s - (num_layers - 1) * device_s
            needed = total_s / (host_s + load_s - device_s)
        return max(1, min(math.ceil(needed - 1e-9), num_layers))

    def extra_s(
        self, num_tokens: int, adapter: ColdAdapter, left_s: float, first_group: int, on_host: int = 0
    ) -> float:
        """Extra time of a prompt that starts now, over a loaded adapter.

        left_s: remaining load time.  first_group: layers loaded last.  on_host: other rows on the host.
        """
        times, num_layers = self.times, self.times.num_layers
        host_s = self.layer_s(num_tokens + on_host, adapter)
        device_s = times.device.seconds(num_tokens, adapter.lora_rank)
        layer_load_s = times.load_s(adapter) / num_layers
        now_s = 0.0
        for layer in range(num_layers):
            number = layer - first_group if layer >= first_group else num_layers - first_group + layer
            there_s = left_s - layer_load_s * (num_layers - 1 - number)
            now_s += device_s if there_s <= now_s else host_s
        return now_s - num_layers * device_s

    def pays(
        self, num_tokens: int, adapter: ColdAdapter, left_s: float, first_group: int, on_host: int = 0
    ) -> bool:
        """True if the first token comes no later than after a wait for the adapter.

        Waits for an overdue adapter (left_s <= 0).
        """
        return left_s > 0 and self.extra_s(num_tokens, adapter, left_s, first_group, on_host) <= left_s

    def pays_at_once(self, num_tokens: int, adapter: ColdAdapter) -> bool:
        """`pays` of a prompt with an idle link."""
        return self.start_s(num_tokens, adapter) < self.times.load_s(adapter)

    def start_s(self, num_tokens: int, adapter: ColdAdapter) -> float:
        """Cost of a cold adapter for a prompt with an idle link: the host's extra time, or a shorter load."""
        load_s = self.times.load_s(adapter)
        group = self.first_group(num_tokens, adapter)
        return min(load_s, self.extra_s(num_tokens, adapter, load_s, group))

    def break_even_tokens(self, adapter: ColdAdapter) -> int | None:
        """The shortest prompt for which a wait for the load is faster, or None."""
        return _least(_LONGEST_PROMPT, lambda num_tokens: not self.pays_at_once(num_tokens, adapter))

    def break_even_load_s(self, num_tokens: int, adapter: ColdAdapter) -> float:
        """Load time below which waiting is faster for this prompt, within a percent."""
        least_s = self.times.load_s(adapter) / 1e4

        def pays(number: int) -> bool:
            rate = adapter.num_bytes / (least_s * 1.01**number)
            times = replace(self.times, load_fixed_s=0.0, load_bytes_per_s=rate)
            return replace(self, times=times).pays_at_once(num_tokens, adapter)

        found = _least(2000, pays)
        return math.inf if found is None else least_s * 1.01**found


def _least(limit: int, holds: Callable[[int], bool]) -> int | None:
    if not holds(limit):
        return None
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def enough_workers(
    times: HostTimes, tokens_per_worker: int, adapter: ColdAdapter, *, max_tokens: int, num_cores: int
) -> int:
    """Workers that compute a step's prompts in time, one per core; 0 if waiting is faster."""
    number = min(num_cores, math.ceil(max_tokens / tokens_per_worker))
    if number < 1:
        return 0
    start = HostStart(times=times, num_workers=number, tokens_per_worker=tokens_per_worker)
    return number if start.pays_at_once(min(tokens_per_worker, max_tokens), adapter) else 0


@dataclass(slots=True)
class _Load:
    adapter: ColdAdapter
    end_s: float
    first_group: int


class HostLoads:
    """Loads under way, in sequence, at the profile's rate.

    rule: None: prompts start on the host, the first layer loaded last.
    """

    def __init__(self, rule: HostStart | None, max_tokens: int) -> None:
        self._rule = rule
        self._max_tokens = max_tokens
        self._loads: dict[Hashable, _Load] = {}
        self._busy_until_s = 0.0

    def begin(
        self, uid: Hashable, adapter: ColdAdapter, num_tokens: int, now_s: float, *, under_way: bool
    ) -> None:
        """Record an ordered load.  under_way: ordered before."""
        if self._rule is None or (under_way and uid in self._loads):
            return
        ahead_s = max(0.0, self._busy_until_s - now_s)
        group = self._rule.first_group(min(num_tokens, self._max_tokens), adapter, ahead_s)
        self._busy_until_s = now_s + ahead_s + self._rule.times.load_s(adapter)
        self._loads[uid] = _Load(adapter, self._busy_until_s, group)

    def end(self, uid: Hashable, now_s: float) -> None:
        """The load ended."""
        if self._loads.pop(uid, None) is not None and not self._loads:
            self._busy_until_s = now_s

    def first_group(self, uid: Hashable) -> int:
        """Layers of the adapter loaded last."""
        load = self._loads.get(uid)
        return 1 if load is None else load.first_group

    def extra_s(self, uid: Hashable, num_tokens: int, on_host: int, now_s: float) -> float:
        """Extra time of a step with num_tokens of this adapter's prompt."""
        load = self._loads.get(uid)
        if self._rule is None or load is None:
            return 0.0
        return self._rule.extra_s(num_tokens, load.adapter, load.end_s - now_s, load.first_group, on_host)

    def pays(self, uid: Hashable, num_tokens: int, on_host: int, now_s: float) -> bool:
        """True if the prompt should start now."""
        load = self._loads.get(uid)
        if self._rule is None or load is None:
            return True
        num_tokens = min(num_tokens, self._max_tokens)
        return self._rule.pays(num_tokens, load.adapter, load.end_s - now_s, load.first_group, on_host)


def load_order(num_layers: int, first_group: int) -> list[int]:
    """Layers in load order: the host's come last."""
    return [*range(first_group, num_layers), *range(min(first_group, num_layers))]


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """Max-min fair division of `total` tokens, up to one token of rounding."""
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], -(-total // (len(wanted) - place)))
        total -= shares[index]
    return shares
