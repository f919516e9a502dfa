# SPDX-License-Identifier: Apache-2.0
"""An engine whose device asks host workers by its stream: here each operation is done when it is queued."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.ranks import host_settings
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.lora.row_routing import Source
from tests.dist.host_workers.queued_stream import InlineStream
from tests.engine.test_host_assisted import (
    HeldCopies,
    ask,
    expected_of,
    num_prompt_rows,
    start,
    worker_pids,
)
from tests.families import FAMILIES, NUM_LAYERS
from tests.models.conftest import served  # noqa: F401  (the fixture)


@pytest.fixture
def streams(monkeypatch):
    """Those of the ranks that are built."""
    found: list[InlineStream] = []

    def stream_of(device: torch.device) -> InlineStream:
        found.append(InlineStream())
        return found[-1]

    monkeypatch.setattr(host_settings, "stream_of", stream_of)
    return found


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "mixtral" else pytest.mark.slow) for f in FAMILIES]
)
@pytest.mark.parametrize("num_killed", [0, 2])
def test_tokens_are_right_and_killed_workers_change_none(family, num_killed, served, streams, monkeypatch):  # noqa: F811
    model = served(family)
    copies = HeldCopies(monkeypatch, 0)
    num_rows = num_prompt_rows() * NUM_LAYERS
    with start(model, "chunked_prefill") as llm:
        before = worker_pids()

        def kill_then_go_on() -> None:
            while llm.stats().lora_rows_host == 0:
                time.sleep(0.001)
            for pid in sorted(before)[:num_killed]:
                os.kill(pid, signal.SIGKILL)
            copies.until(llm, num_rows)

        thread = threading.Thread(target=kill_then_go_on)
        thread.start()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        thread.join()
        stats = llm.stats()
    assert stats.lora_rows_host == num_rows
    assert (stats.host_fallback_rows > 0) == (num_killed > 0)
    [stream] = streams
    assert not stream.registered, "the device lets the memory go"
    assert not worker_pids()


@pytest.mark.parametrize(("loading_slot", "compiled"), [(None, True), (0, False)])
def test_graph_of_decode_steps_never_has_rows_of_hosts(loading_slot, compiled):
    """The last token of a prompt whose adapter is loading makes a step that looks like one of decoding."""
    packed = SimpleNamespace(name="a", content_hash="0" * 64, targets=("q",), layers=(), has_columns=False)
    slot = 0 if loading_slot is None else None
    adapter = AdapterVersion(1, 1, packed, slot, loading_slot=loading_slot)
    runner = ModelRunner.__new__(ModelRunner)
    runner._buckets, runner._eager, runner.merged, runner._present = [1, 2], False, None, None
    runner._sources, runner._groups, runner._lora_rows = [Source.LOCAL], ((0,),) * NUM_LAYERS, {}
    runner._lora_rows = dict.fromkeys(Source, 0)
    table = SimpleNamespace(pages=[0])
    fields = {"num_computed": 4, "base_tokens": 0, "tokens": list(range(5))}
    sequence = SimpleNamespace(adapter=adapter, table=table, **fields)
    plan = [SimpleNamespace(sequence=sequence, num_tokens=1, samples=True)]
    batch = runner._batch(plan, 1)
    assert batch.tables.decode
    assert batch.compiled == compiled
    assert np.any(batch.routing.loading) == (loading_slot is not None)
