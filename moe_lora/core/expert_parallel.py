"""Which experts each rank of an instance holds."""

from __future__ import annotations

from .errors import ConfigError


def check_expert_parallel(num_experts: int, expert_parallel: int) -> None:
    """Raises ConfigError, with the allowed values, if the experts can't be dealt out evenly."""
    if expert_parallel == 1 or (num_experts and num_experts % expert_parallel == 0):
        return
    if not num_experts:
        raise ConfigError(
            f"expert_parallel={expert_parallel} needs a Mixture-of-Experts model, and this one is dense; "
            "choose 1"
        )
    *most, last = (str(p) for p in range(1, num_experts + 1) if num_experts % p == 0)
    raise ConfigError(
        f"expert_parallel={expert_parallel} does not divide num_experts={num_experts}; "
        f"choose {', '.join(most)} or {last}"
    )


def experts_of_rank(num_experts: int, expert_parallel: int, dist_rank: int) -> range:
    """The contiguous experts of one rank: expert e belongs to rank e // (num_experts / expert_parallel)."""
    check_expert_parallel(num_experts, expert_parallel)
    share = num_experts // expert_parallel
    return range(dist_rank * share, (dist_rank + 1) * share)
