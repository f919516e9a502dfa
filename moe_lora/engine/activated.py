# SPDX-License-Identifier: Apache-2.0
"""Sequences of activated LoRAs: the adapter starts at the last invocation tokens of the prompt.

Earlier rows and KV are the base's, shared by all requests.  Source: aLoRA (arXiv 2504.12397); peft,
tuners/lora/variants.py, calculate_alora_offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from moe_lora.cache.pages import BlockTable
from moe_lora.core.request import GenerateRequest
from moe_lora.engine.adapters.adapter_store import AdapterVersion

from .sequence import Sequence

TOKEN_BYTES = array("q").itemsize


def activated(make: Callable[..., Sequence]) -> Callable[..., Sequence]:
    """As `make`, for an adapter with invocation tokens."""

    def made(request: GenerateRequest, adapter: AdapterVersion, *rest: Any) -> Sequence:
        start = invocation_start(request.prompt_token_ids, adapter.packed.invocation)
        sequence = make(request, None if start is None else adapter, *rest)
        if start:
            sequence.base_tokens, sequence.table = start, BlockTable(None)
        return sequence

    return made


def invocation_start(prompt: Seq[int], invocation: Seq[int]) -> int | None:
    """Index of the last `invocation` in the prompt, if any."""
    text, wanted = (array("q", tokens).tobytes() for tokens in (prompt, invocation))
    place = text.rfind(wanted)
    while place % TOKEN_BYTES and place >= 0:
        place = text.rfind(wanted, 0, place + len(wanted) - 1)
    return None if place < 0 else place // TOKEN_BYTES
