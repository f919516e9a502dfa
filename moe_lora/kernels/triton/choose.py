"""Which algorithm computes a delta: a rule over site shape, rank and dtype, never over the batch or phase.

`wgmma`: SGMV, tensor-core tiles with swapped operands.
`vector`: BGMV, one row per work item, sums by threads.
`fused`: shrink and expand in one kernel, for small ranks; only where the caller of a whole delta allows it.

A row's result must not depend on the rows beside it, so neither segment length nor the number of rows may
decide, nor whether the step is a decode one, which is a matter of the rows beside it too.  Where the table
gives classes of ranks different algorithms, each class is a launch of its own that passes over the other
ranks.  The engine and the LoRA Server never allow `fused`: its sums are ordered
differently, and a delta computed whole must equal, bit for bit, one computed in two halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_lora.core.shape import MAX_LORA_RANK

from .configs import Choice, Table, matches

if TYPE_CHECKING:
    from moe_lora.core.shape import Site

ALGORITHMS = ("wgmma", "vector", "fused")


def choose(site: Site, dtype: str, table: Table, whole: bool = False) -> tuple[Choice, ...]:
    """The table's choices that apply here; together they cover each rank from 1 on exactly once.

    dtype: "bf16", "fp16" or "fp32".  whole: one kernel may do it all, choices for that, if any, come first.
    Raises ValueError if the table's choices overlap or leave a rank out.
    """
    wanted = (dtype, site.in_features, sum(site.out_features))
    found = [
        choice
        for choice in table.choices
        if matches((choice.dtype, choice.in_features, choice.out_features), wanted)
    ]
    own = [choice for choice in found if choice.whole] if whole else []
    most_specific = _first_group(own or [choice for choice in found if not choice.whole])
    covered = sorted((choice.min_rank, choice.max_rank) for choice in most_specific)
    bounds = [0, *(high for _, high in covered)]
    if bounds[-1] != MAX_LORA_RANK or any(low != bounds[i] + 1 for i, (low, _) in enumerate(covered)):
        raise ValueError(
            f"choices of table {table.gpu!r} for site {site.name!r} in {dtype} cover ranks "
            f"{covered}; they must cover 1..{MAX_LORA_RANK} without gap or overlap"
        )
    return most_specific


def _first_group(choices: list[Choice]) -> tuple[Choice, ...]:
    """The choices that share the first one's key: classes of ranks of one rule."""
    if not choices:
        return ()
    keys = [(choice.dtype, choice.in_features, choice.out_features) for choice in choices]
    return tuple(choice for choice, key in zip(choices, keys, strict=True) if key == keys[0])


def forced(algorithm: str) -> tuple[Choice, ...]:
    """One class of all ranks for an algorithm that the caller names. Raises ValueError if it is unknown."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    return (Choice(algorithm=algorithm),)
