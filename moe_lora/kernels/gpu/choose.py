"""Which algorithm computes a delta: a rule over site shape, rank, dtype and phase, never over the batch.

`wgmma`: SGMV, tensor-core tiles with swapped operands.
`vector`: BGMV, one row per work item, sums by threads.
`fused`: shrink and expand in one kernel, for small ranks; only where a whole delta is asked for.

A row's result must not depend on the rows beside it, so neither segment length nor the number of rows may
decide.  Where the table gives classes of ranks different algorithms, each class is a launch of its own that
passes over the other ranks.  No default entry picks `fused`: its sums are ordered differently, and a delta
computed whole (on a LoRA Server) must equal, bit for bit, one computed in two halves (beside the base GEMM).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .configs import PHASES, Choice, Table, matches

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

ALGORITHMS = ("wgmma", "vector", "fused")


def choose(site: Site, dtype: str, decode: bool, table: Table, whole: bool = False) -> tuple[Choice, ...]:
    """The table's choices that apply here; together they cover each rank 1..512 exactly once.

    dtype: "bf16", "fp16" or "fp32".  whole: for `lora_delta`, whose own choices, if any, come first.
    Raises ValueError if the table's choices overlap or leave a rank out.
    """
    phase = PHASES[0] if decode else PHASES[1]
    wanted = (dtype, phase, site.in_features, sum(site.out_features))
    found = [
        choice
        for choice in table.choices
        if matches((choice.dtype, choice.phase, choice.in_features, choice.out_features), wanted)
    ]
    own = [choice for choice in found if choice.whole] if whole else []
    most_specific = _first_group(own or [choice for choice in found if not choice.whole])
    covered = sorted((choice.min_rank, choice.max_rank) for choice in most_specific)
    bounds = [0, *(high for _, high in covered)]
    if not covered or bounds[-1] != 512 or any(low != bounds[i] + 1 for i, (low, _) in enumerate(covered)):
        raise ValueError(
            f"choices of table {table.gpu!r} for site {site.name!r} in {dtype} {phase} cover ranks "
            f"{covered}; they must cover 1..512 without gap or overlap"
        )
    return most_specific


def _first_group(choices: list[Choice]) -> tuple[Choice, ...]:
    """The choices that share the first one's key: classes of ranks of one rule."""
    if not choices:
        return ()
    keys = [(choice.dtype, choice.phase, choice.in_features, choice.out_features) for choice in choices]
    return tuple(choice for choice, key in zip(choices, keys, strict=True) if key == keys[0])


def forced(algorithm: str) -> tuple[Choice, ...]:
    """One class of all ranks for an algorithm that the caller names. Raises ValueError if it is unknown."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    return (Choice(algorithm=algorithm),)
