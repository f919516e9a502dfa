# SPDX-License-Identifier: Apache-2.0
"""Requests with `on_publish="switch"` go on with a new version of their adapter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from moe_lora.cache.pages import BlockTable
from moe_lora.scheduling.scheduler import Scheduler

from .adapters.adapter_store import AdapterVersion
from .adapters.manager import AdapterManager
from .sequence import Sequence


def switch(
    sequences: Seq[Sequence],
    adapter: AdapterVersion,
    scheduler: Scheduler[Sequence],
    adapters: AdapterManager,
) -> None:
    """Have the sequences compute prompt and answer so far again, with this version.

    Versions share no KV.  Tokens, pauses, moves, seed, grammar and report stay.  Arriving KV is dropped.  No
    step may be under way.
    """
    for sequence in reversed(sequences):
        assert sequence.tokens[-1] >= 0, "a running step draws the last token"
        scheduler.restart(sequence)
        before = sequence.adapter
        _set_version(sequence, adapter)
        if sequence.adapter is not None:
            adapters.enqueue(sequence.adapter)
        if before is not None:
            adapters.dequeue(before)


def _set_version(sequence: Sequence, adapter: AdapterVersion) -> None:
    start: int | None = 0
    if adapter.packed.invocation:
        from .activated import invocation_start

        start = invocation_start(sequence.request.prompt_token_ids, adapter.packed.invocation)
    sequence.adapter = None if start is None else adapter
    sequence.adapter_uid = None if start is None else adapter.uid
    sequence.base_tokens = start or 0
    sequence.table = BlockTable(None if start else sequence.adapter_uid)
