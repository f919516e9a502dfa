# SPDX-License-Identifier: Apache-2.0
"""Prompts that no host worker and not the engine can compute wait for the load of their adapter."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from moe_lora.core.errors import AdapterError
from moe_lora.dist.deltas.host_deltas import HostDeltas
from moe_lora.dist.host_workers.worker_link import StreamWorkerLink, WorkerLink
from moe_lora.engine.ranks import host_settings
from tests.dist.host_workers.queued_stream import InlineStream
from tests.engine.test_host_assisted import HeldCopies, ask, expected_of, start, worker_pids
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.patience import PATIENCE_S


def end_workers(monkeypatch) -> None:
    """Kill the workers, and have none come back."""

    def fail(link, held):
        raise RuntimeError("a process can't be started")

    monkeypatch.setattr(WorkerLink, "_live", fail)
    monkeypatch.setattr(StreamWorkerLink, "_live", fail)
    for pid in worker_pids():
        os.kill(pid, signal.SIGKILL)


def fail_for(monkeypatch, bad) -> list[str]:
    """Have this process fail at adapters of these content hashes; returns a list of the failed ones."""
    compute, failed = HostDeltas.compute, []

    def maybe(deltas, request, adapters, row_adapter, out):
        used = {adapters[index].content_hash for index in set(row_adapter.tolist()) if index >= 0}
        if lost := sorted(used & bad):
            failed.extend(lost)
            raise AdapterError(f"adapter {lost[0]} is not on this host")
        compute(deltas, request, adapters, row_adapter, out)

    monkeypatch.setattr(HostDeltas, "compute", maybe)
    return failed


QUICK = (("all_at_once", 1, True), ("chunked_prefill", 3, False))


@pytest.mark.parametrize(
    ("way", "num_bad", "streamed"),
    [
        pytest.param(
            way,
            num_bad,
            streamed,
            marks=() if (way, num_bad, streamed) in QUICK else pytest.mark.slow,
        )
        for way in ("all_at_once", "chunked_prefill")
        for num_bad in (1, 3)
        for streamed in (False, True)
    ],
)
def test_requests_of_adapters_that_the_host_can_not_compute_wait_for_the_device(
    streamed,
    num_bad,
    way,
    served,  # noqa: F811
    monkeypatch,
    caplog,
):
    model = served("mixtral")
    if streamed:
        monkeypatch.setattr(host_settings, "stream_of", lambda device: InlineStream())
    copies = HeldCopies(monkeypatch, 0)
    with start(model, way) as llm:
        hashes = [one.content_hash for one in llm.list_adapters()]
        end_workers(monkeypatch)
        failed = fail_for(monkeypatch, set(hashes[:num_bad]))

        def waiting() -> list[str]:
            return [text for text in caplog.messages if "its requests wait for its load" in text]

        def go_on_after_failures() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while len(waiting()) < num_bad and time.monotonic() < deadline:
                time.sleep(0.01)
            copies.go_on.set()

        thread = threading.Thread(target=go_on_after_failures)
        thread.start()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        thread.join()
        assert set(failed) == set(hashes[:num_bad])
        assert all(one.residency == "device" for one in llm.list_adapters())
        answered = ask(llm, model)
        assert answered == expected_of(model, answered), "no wrong prefix is found"
    assert len(waiting()) == len(set(waiting())) == num_bad, "one line for each adapter"
