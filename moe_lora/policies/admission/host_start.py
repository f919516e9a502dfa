# SPDX-License-Identifier: Apache-2.0
"""Prompts that host workers compute while their adapters load: when that pays, how much of each in a step.

Legend: L prompt tokens of a step, r LoRA rank, c tokens that one worker computes in time, N layers.
Source: Toppings sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_lora.core.errors import ConfigError

TOKENS_PER_WORKER = 32
"""c where no profile tells it."""
_LONGEST_PROMPT = 1 << 17
_LARGEST = 1e30
"""Of a profile's numbers, so that nothing computed from them overflows; a divisor's least is 1 / _LARGEST."""
_MOST = 1 << 20
"""Of a profile's counts."""


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """seconds(L, r) = fixed_s + per_token_s L + per_rank_s r + per_token_rank_s L r; 0 for no tokens."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_rank_s: float = 0.0
    per_token_rank_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, (int, float)) and 0 <= value <= _LARGEST):
                raise ConfigError(f"{name}={value!r} must be a number of seconds from 0 to {_LARGEST}")

    def seconds(self, num_tokens: float, lora_rank: float) -> float:
        if not num_tokens:
            return 0.0
        by_token = self.per_token_s + self.per_token_rank_s * lora_rank
        return self.fixed_s + self.per_rank_s * lora_rank + by_token * num_tokens


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """What was measured on one machine (`moe-lora profile-steps --host-worker`).

    worker: by site, named by its modules ("q+k+v"), one worker's time for a layer's deltas there, messages
    included.  device: a layer of a prompt on the device, deltas included.  load_fixed_s,
    load_bytes_per_s: bringing an adapter to the device.  bytes_per_rank: of an adapter on all sites measured.
    max_tokens, max_rank: largest measured.
    """

    worker: Mapping[str, PartTime]
    device: PartTime
    num_layers: int
    load_fixed_s: float
    load_bytes_per_s: float
    bytes_per_rank: float
    max_tokens: int
    max_rank: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "max_tokens", "max_rank"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be from 1 to {_MOST}")
        for name in ("load_bytes_per_s", "bytes_per_rank"):
            if not 1 / _LARGEST <= getattr(self, name) <= _LARGEST:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be from {1 / _LARGEST} to {_LARGEST}")
        if not 0 <= self.load_fixed_s <= _LARGEST:
            raise ConfigError(f"load_fixed_s={self.load_fixed_s!r} must be from 0 to {_LARGEST}")

    def adapter(self, lora_rank: int) -> ColdAdapter:
        """An adapter of this rank on all sites but the choice of experts."""
        targets = [module for modules in self.worker for module in modules.split("+") if module != "router"]
        return ColdAdapter(
            lora_rank=lora_rank, num_bytes=lora_rank * self.bytes_per_rank, targets=tuple(targets)
        )

    def load_s(self, adapter: ColdAdapter) -> float:
        """Time to bring the adapter to the device while nothing else is brought."""
        return self.load_fixed_s + adapter.num_bytes / self.load_bytes_per_s

    def worker_s(self, num_tokens: float, adapter: ColdAdapter) -> float:
        """One worker's time for a layer's deltas of so many rows."""
        return math.fsum(
            time.seconds(num_tokens, adapter.lora_rank)
            for modules, time in self.worker.items()
            if adapter.targets is None or not set(modules.split("+")).isdisjoint(adapter.targets)
        )

    def tokens_per_worker(self, lora_rank: int) -> int:
        """c: the most tokens, of those measured, that a worker computes while the device computes a layer of
        as many.  Where there are none, the number at which a piece's fixed time is half of its time: smaller
        ones would be messages above all.
        """
        adapter = self.adapter(lora_rank)
        for num_tokens in range(self.max_tokens, 0, -1):
            if self.worker_s(num_tokens, adapter) <= self.device.seconds(num_tokens, lora_rank):
                return num_tokens
        per_token_s = self.worker_s(2, adapter) - self.worker_s(1, adapter)
        fixed_s = self.worker_s(1, adapter) - per_token_s
        if fixed_s >= per_token_s * self.max_tokens:
            return self.max_tokens
        return max(1, round(fixed_s / per_token_s))


@dataclass(frozen=True, kw_only=True)
class ColdAdapter:
    """An adapter that is not on the device.  targets: modules that it has deltas for; None: all."""

    lora_rank: int
    num_bytes: float
    targets: Collection[str] | None = None


@dataclass(frozen=True, kw_only=True)
class HostStart:
    """Whether, and from which layers on, a prompt begins on host workers instead of waiting for its adapter,
    and how much of it in a step.

    tokens_per_worker: c; rows go in pieces of c at most to one worker after the other.  The host is taken to
    work beside the device, which waits for what takes longer.  tpot_budget_s: see `tokens_per_step`.
    """

    times: HostTimes
    num_workers: int
    tokens_per_worker: int
    tpot_budget_s: float | None = None

    def tokens_per_step(self, max_tokens: int) -> int:
        """Prompt rows on the host, at most, in a step that computes for others too: what the workers compute
        in time, or the most, up to max_tokens, of which no number takes longer than tpot_budget_s in all
        layers, for an adapter of the largest rank measured.

        Raises ConfigError where a single row does.
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
        """A layer whose deltas of so many rows the host computes."""
        host_s = 0.0
        if num_tokens:
            num_pieces = math.ceil(num_tokens / self.tokens_per_worker)
            in_turn = math.ceil(num_pieces / self.num_workers)
            host_s = in_turn * self.times.worker_s(math.ceil(num_tokens / num_pieces), adapter)
        return max(host_s, self.times.device.seconds(num_tokens, adapter.lora_rank))

    def first_group(self, num_tokens: int, adapter: ColdAdapter, ahead_s: float = 0.0) -> int:
        """How many layers the host is to compute, if the prompt begins when the load is ordered: the fewest
        after which each layer is on the device when its turn comes.  The others are loaded first.

        ahead_s: until the load begins.  Source: Toppings section 4.1, pipeline loading.
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
        """How much longer the prompt takes that begins now than one whose adapter is there.

        left_s: until the adapter is.  first_group: layers that come last.  on_host: rows of other adapters
        that host workers compute in the same step.
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
        """Whether the first token comes no later than if the request waited for its adapter.

        One that should be there by now (left_s <= 0) is waited for: it may come at any moment.
        """
        return left_s > 0 and self.extra_s(num_tokens, adapter, left_s, first_group, on_host) <= left_s

    def pays_at_once(self, num_tokens: int, adapter: ColdAdapter) -> bool:
        """`pays` of a prompt that comes when nothing is being loaded."""
        return self.start_s(num_tokens, adapter) < self.times.load_s(adapter)

    def start_s(self, num_tokens: int, adapter: ColdAdapter) -> float:
        """What it costs a prompt, that comes when nothing is being loaded, that its adapter is cold: the
        host's extra time, or the load's where that is shorter.
        """
        load_s = self.times.load_s(adapter)
        group = self.first_group(num_tokens, adapter)
        return min(load_s, self.extra_s(num_tokens, adapter, load_s, group))

    def break_even_tokens(self, adapter: ColdAdapter) -> int | None:
        """The shortest prompt, in one step, for which waiting for a whole load is quicker, found by halving
        (rounding to pieces of c may make a shorter one of that kind); None: there is none of a length in use.
        """
        return _least(_LONGEST_PROMPT, lambda num_tokens: not self.pays_at_once(num_tokens, adapter))

    def break_even_load_s(self, num_tokens: int, adapter: ColdAdapter) -> float:
        """The load time below which waiting is quicker for a prompt of so many tokens, within a percent."""
        least_s = self.times.load_s(adapter) / 1e4

        def pays(number: int) -> bool:
            rate = adapter.num_bytes / (least_s * 1.01**number)
            times = replace(self.times, load_fixed_s=0.0, load_bytes_per_s=rate)
            return replace(self, times=times).pays_at_once(num_tokens, adapter)

        found = _least(2000, pays)
        return math.inf if found is None else least_s * 1.01**found


def _least(limit: int, holds: Callable[[int], bool]) -> int | None:
    """The least number from 1 to limit from which on it holds; None: it does not at the limit."""
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
    """Workers that compute a step's prompts in time, one a core; 0 where waiting for an adapter would be
    quicker even for a prompt that one worker computes in time.  max_tokens: of a step.
    """
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
    """Loads under way as a `HostStart` sees them: one after the other, at the profile's rate.

    rule: None: without a profile every prompt begins on the host, and its first layer comes last.
    max_tokens: of a step.  Copies of history, and loads ahead of need until a request asks for them, are not
    counted.
    """

    def __init__(self, rule: HostStart | None, max_tokens: int) -> None:
        self._rule = rule
        self._max_tokens = max_tokens
        self._loads: dict[Hashable, _Load] = {}
        self._busy_until_s = 0.0

    def begin(
        self, uid: Hashable, adapter: ColdAdapter, num_tokens: int, now_s: float, *, under_way: bool
    ) -> None:
        """A load was ordered for a request of so many tokens.  under_way: it had been before, for another
        request, or ahead of need, which counts as ordered now.
        """
        if self._rule is None or (under_way and uid in self._loads):
            return
        ahead_s = max(0.0, self._busy_until_s - now_s)
        group = self._rule.first_group(min(num_tokens, self._max_tokens), adapter, ahead_s)
        self._busy_until_s = now_s + ahead_s + self._rule.times.load_s(adapter)
        self._loads[uid] = _Load(adapter, self._busy_until_s, group)

    def end(self, uid: Hashable, now_s: float) -> None:
        """The load ended, whether or not anybody still asks for the adapter."""
        if self._loads.pop(uid, None) is not None and not self._loads:
            self._busy_until_s = now_s

    def first_group(self, uid: Hashable) -> int:
        """Layers of the adapter that are to come last."""
        load = self._loads.get(uid)
        return 1 if load is None else load.first_group

    def extra_s(self, uid: Hashable, num_tokens: int, on_host: int, now_s: float) -> float:
        """How much longer a step takes that computes so many tokens of a prompt of this adapter."""
        load = self._loads.get(uid)
        if self._rule is None or load is None:
            return 0.0
        return self._rule.extra_s(num_tokens, load.adapter, load.end_s - now_s, load.first_group, on_host)

    def pays(self, uid: Hashable, num_tokens: int, on_host: int, now_s: float) -> bool:
        """Whether so many tokens of a prompt of this adapter are to begin now."""
        load = self._loads.get(uid)
        if self._rule is None or load is None:
            return True
        num_tokens = min(num_tokens, self._max_tokens)
        return self._rule.pays(num_tokens, load.adapter, load.end_s - now_s, load.first_group, on_host)


def load_order(num_layers: int, first_group: int) -> list[int]:
    """Layers in the order in which they are loaded: those that the host computes meanwhile come last."""
    return [*range(first_group, num_layers), *range(min(first_group, num_layers))]


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """A division of `total` tokens: nobody gets more than it wants, and who gets less than it wants has, but
    for one token of rounding, as much as anybody (max-min fairness).  So a long prompt does not keep the
    shorter ones behind it waiting.  Of equal ones the first has what rounding leaves.
    """
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], -(-total // (len(wanted) - place)))
        total -= shares[index]
    return shares
