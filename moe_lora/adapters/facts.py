# SPDX-License-Identifier: Apache-2.0
"""Facts of a packed adapter without its bytes.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A packed adapter without its bytes; plain picklable data.

    dtype: torch's name without "torch.".  num_entries: rows of each layer's table.  layer_elements: elements
    of each layer's data.  The rest as in `PackedAdapter`.
    """

    name: str
    content_hash: str
    max_lora_rank: int
    nbytes: int
    targets: tuple[str, ...]
    dtype: str
    num_entries: int
    layer_elements: tuple[int, ...]
