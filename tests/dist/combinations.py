# SPDX-License-Identifier: Apache-2.0
"""What the LoRA Server must give the local backend's bits for."""

from __future__ import annotations

import importlib.util
from itertools import product

from tests.families import BESIDE_FAMILIES, FAMILIES, MOE_FAMILIES

from .covering import Row

TRANSPORTS = ("shm", "gloo", *(["nixl"] if importlib.util.find_spec("nixl") else []))
"""Those of a CPU that are installed."""
FACTORS = {
    "family": FAMILIES,
    "layout": ("EP1-PP1", "EP2-PP1", "EP1-PP2", "EP2-PP2", "EP4-PP2"),
    "expert_parallel": ("1", "2"),
    "transport": TRANSPORTS,
    "dtype": ("float32", "bfloat16"),
    "sites": ("all", "experts"),
}


def is_possible(row: Row) -> bool:
    """A dense model has no experts to share among ranks, or to have computed apart."""
    return row["family"] in MOE_FAMILIES or (row["expert_parallel"] == "1" and row["sites"] == "all")


def beside_rows() -> list[Row]:
    """Rows of the families with shared experts and dense layers, whose sites are in some layers only."""
    first = {name: values[0] for name, values in FACTORS.items()}
    ways = [("EP2-PP1", "2", "all"), ("EP1-PP2", "1", "experts"), ("EP2-PP2", "2", "experts")]
    return [
        first | {"family": family, "layout": layout, "expert_parallel": ranks, "sites": sites}
        for (layout, ranks, sites), family in product(ways, BESIDE_FAMILIES)
    ]


def title(row: Row) -> str:
    """The row's name, such as "mixtral EP2-PP1 p=2 shm float32 experts"."""
    return "{family} {layout} p={expert_parallel} {transport} {dtype} {sites}".format_map(row)
