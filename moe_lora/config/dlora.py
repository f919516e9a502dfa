# SPDX-License-Identifier: Apache-2.0
"""Settings of dLoRA's merging policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from moe_lora.core.errors import ConfigError

from .settings import Settings, setting


def _of_dlora(default: Any, **rule: Any) -> Any:
    return setting(default, policy="engine.batching=dlora", **rule)


@dataclass(frozen=True, kw_only=True)
class DLoraConfig(Settings):
    """Parameters of batching=dlora (docs/guides/merging.md).

    Defaults are the values of the authors' artifact (LLMServe/dLoRA-artifact, vllm/core/scheduler.py), except
    for period, least_threshold and most_threshold.  Source: dLoRA, Algorithms 1 to 3.
    """

    SECTION: ClassVar[str] = "dlora"

    alpha_switch: float = _of_dlora(1.0, above=0)
    """Requests of the largest adapter by requests of the FCFS batch.  Weights merge from this ratio on.  The
    ratio is a start: break points tune the threshold."""
    beta_switch: float = _of_dlora(15 / 27, above=0)
    """Weights unmerge below this ratio.  The ratio is a start too, and at most alpha_switch."""
    gamma_dec: float = _of_dlora(0.05, least=0)
    """Break points move a threshold by this step towards the mode that served more."""
    gamma_mul: float = _of_dlora(1.1, least=1)
    """Break points move a threshold by this factor away from the mode that served less."""
    period: int = _of_dlora(8, least=1)
    """Steps after which a break point comes, if none came before.  The artifact tunes at changes of mode
    only."""
    least_threshold: float = _of_dlora(0.1, above=0)
    """Lower bound of both thresholds."""
    most_threshold: float = _of_dlora(1.5, above=0)
    """Upper bound of both thresholds."""
    credit: float = _of_dlora(10_000.0, above=0)
    """First credit of an adapter for each other adapter, in units of max_num_seqs.  A request that a step
    passes over moves 1 / max_num_seqs of a unit to its adapter."""
    t_starve: float = _of_dlora(10_000.0, above=0)
    """Credit above the first credit from which on an adapter starves, in the same units.  Steps serve
    adapters that starve before all others."""
    t_normal: float = _of_dlora(5_000.0, least=1)
    """Credit above the first credit below which an adapter starves no longer, in the same units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (
            ("least_threshold", "beta_switch"),
            ("least_threshold", "alpha_switch"),
            ("alpha_switch", "most_threshold"),
            ("t_normal", "t_starve"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ConfigError(
                    f"dlora.{low}={least:g} is above dlora.{high}={most:g}; lower the first, or raise the "
                    "second"
                )
