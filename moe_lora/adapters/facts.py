# SPDX-License-Identifier: Apache-2.0
"""What is known of a packed adapter by those who don't have its bytes.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A packed adapter without its bytes; plain picklable data.

    dtype: of the data, as torch calls it without "torch.".  num_entries: rows of each layer's table.
    layer_elements: elements of each layer's data.  The others are those of `PackedAdapter`.
    """

    name: str
    content_hash: str
    max_lora_rank: int
    nbytes: int
    targets: tuple[str, ...]
    dtype: str
    num_entries: int
    layer_elements: tuple[int, ...]
