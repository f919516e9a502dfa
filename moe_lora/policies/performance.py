"""How long a batch of adapters takes: Toppings' linear models, and what routing needs beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError

KERNELS = ("bgmv", "mbgmv")


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """Seconds of an iteration over a batch: alpha_s · work + beta_s, 0 for an empty batch."""

    alpha_s: float
    beta_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta_s >= 0):
            raise ConfigError(
                f"alpha_s={self.alpha_s}, beta_s={self.beta_s} must be 0 or more; fit them again"
            )


@dataclass(frozen=True, kw_only=True)
class PerformanceModel:
    """prefill, decode: of an iteration.  kernel: what its work is, "bgmv": requests times their highest rank,
    "mbgmv": the sum of their ranks (Toppings, equation 2).  mean_output_tokens: Toppings' avg_resp_len.
    slo_s: time of a decode iteration that must not be passed.  token_s: time that a token of outstanding work
    takes an instance; adapter_load_s: time to bring in an adapter, per unit of rank (dLoRA section 5.1).
    """

    prefill: LinearTime
    decode: LinearTime
    kernel: str = "bgmv"
    mean_output_tokens: float = 128.0
    slo_s: float = float("inf")
    token_s: float = 0.0
    adapter_load_s_per_rank: float = 0.0

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ConfigError(f"kernel={self.kernel!r} is unknown; choose one of {', '.join(KERNELS)}")
        for name in ("mean_output_tokens", "slo_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
        for name in ("token_s", "adapter_load_s_per_rank"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")

    def seconds(self, part: LinearTime, batch: Batch) -> float:
        """Of an iteration over the batch by `prefill` or `decode`.  Source: Toppings, equation 2."""
        if not batch.num_requests:
            return 0.0
        work = batch.num_requests * batch.max_rank if self.kernel == "bgmv" else batch.sum_ranks
        return part.alpha_s * work + part.beta_s


@dataclass(frozen=True)
class Batch:
    """Requests as the models see them; the base model has rank 0."""

    num_requests: int
    max_rank: int
    sum_ranks: int

    @classmethod
    def of(cls, counts: Mapping[str | None, int], ranks: Mapping[str, int]) -> Batch:
        """Requests of each adapter; one whose rank is not known counts as base model."""
        highest = total = number = 0
        for adapter, count in counts.items():
            rank = 0 if adapter is None else ranks.get(adapter, 0)
            highest = max(highest, rank)
            total += rank * count
            number += count
        return cls(number, highest, total)

    def with_one(self, rank: int) -> Batch:
        return Batch(self.num_requests + 1, max(self.max_rank, rank), self.sum_ranks + rank)

    def __add__(self, other: Batch) -> Batch:
        return Batch(
            self.num_requests + other.num_requests,
            max(self.max_rank, other.max_rank),
            self.sum_ranks + other.sum_ranks,
        )


def read_performance_model(path: str | Path) -> PerformanceModel:
    """The model in a JSON file, its fields by name.  Raises ConfigError naming file and field."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        if not isinstance(given, dict):
            raise ConfigError("a mapping of fields is needed")
        parts = {name: LinearTime(**_checked(LinearTime, given.get(name), name)) for name in _PARTS}
        return PerformanceModel(**{**_checked(PerformanceModel, given, ""), **parts})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


_PARTS = ("prefill", "decode")


def _checked(kind: type, given: Any, place: str) -> dict[str, Any]:
    """Known fields with numbers in them (kernel: text, parts: checked on their own)."""
    allowed = [one.name for one in fields(kind)]
    if not isinstance(given, dict):
        raise ConfigError(f"{place} is needed, such as {{'alpha_s': 1e-6, 'beta_s': 0.01}}")
    for name, value in given.items():
        if name not in allowed:
            raise ConfigError(f"{name!r} is not a field; allowed are {', '.join(allowed)}")
        if name in ("kernel", *_PARTS):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r} must be a number")
    if kind is LinearTime and "alpha_s" not in given:
        raise ConfigError(f"{place}.alpha_s is needed, in seconds")
    return dict(given)
