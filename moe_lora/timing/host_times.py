# SPDX-License-Identifier: Apache-2.0
"""Times of a host beside its device: copies over a link, prompts computed by workers.

Legend: L prompt tokens of a step, r LoRA rank, c tokens computed by one worker in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from moe_lora.core.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

_LARGEST = 1e30
"""Against overflow."""
_MOST = 1 << 20

Amount = TypeVar("Amount", float, "NDArray[Any]")


class LinkTime(NamedTuple):
    """seconds(n) = latency_s + n / bytes_per_s, of n bytes over an idle link."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: Amount) -> Amount:
        return self.latency_s + num_bytes / self.bytes_per_s

    def of_parts(self, number: Amount, part_bytes: float) -> Amount:
        """Seconds of equal parts in one copy."""
        return self.latency_s + number * (part_bytes / self.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """Costs of restoring bytes or KV.

    transfer_bytes_per_s: host to device.  transfer_s: latency of a copy.  disk_bytes_per_s: files to device.
    attention_s_per_token2: per token and earlier token.  wait_s: a request's fixed loss by missing nodes.
    """

    page_bytes: int
    transfer_bytes_per_s: float = 20e9
    transfer_s: float = 20e-6
    disk_bytes_per_s: float = 2e9
    prefill_tokens_per_s: float = 10_000.0
    attention_s_per_token2: float = 1e-9
    wait_s: float = 0.02

    def move_s(self, pages: Amount) -> Amount:
        """Seconds from host to device."""
        return LinkTime(self.transfer_bytes_per_s, self.transfer_s).of_parts(pages, self.page_bytes)

    def load_s(self, pages: Amount) -> Amount:
        """Seconds from files."""
        return LinkTime(self.disk_bytes_per_s, self.transfer_s).of_parts(pages, self.page_bytes)

    def recompute_s(self, first_token: Amount, num_tokens: Amount) -> Amount:
        """Seconds for KV of num_tokens tokens after first_token others."""
        attended = num_tokens * (first_token + num_tokens / 2.0)
        return num_tokens / self.prefill_tokens_per_s + self.attention_s_per_token2 * attended


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
    """Measured times of one machine (`moe-lora profile-steps --host-worker`).

    worker: a worker's time for a layer's deltas, by site ("q+k+v").  device: a prompt's layer with deltas.
    load_fixed_s, load_bytes_per_s: to the device.  bytes_per_rank: on all sites.
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
        """An adapter of this rank on all sites but "router"."""
        targets = [module for modules in self.worker for module in modules.split("+") if module != "router"]
        return ColdAdapter(
            lora_rank=lora_rank, num_bytes=lora_rank * self.bytes_per_rank, targets=tuple(targets)
        )

    def load_s(self, adapter: ColdAdapter) -> float:
        """Load time on an idle link."""
        return LinkTime(self.load_bytes_per_s, self.load_fixed_s).seconds(adapter.num_bytes)

    def worker_s(self, num_tokens: float, adapter: ColdAdapter) -> float:
        """One worker's time for a layer."""
        return math.fsum(
            time.seconds(num_tokens, adapter.lora_rank)
            for modules, time in self.worker.items()
            if adapter.targets is None or not set(modules.split("+")).isdisjoint(adapter.targets)
        )

    def tokens_per_worker(self, lora_rank: int) -> int:
        """c: most measured tokens computed by a worker within the device's layer time.

        If none: the number whose fixed time is half of the piece's time.
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
    """An adapter absent from the device.  targets None: all modules."""

    lora_rank: int
    num_bytes: float
    targets: Collection[str] | None = None
