# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from moe_lora.engine.adapters.copies import BringAdapter
from tests.engine.parts import HeldMover, Parts, packed


def test_idle_engine_is_called_again_only_while_there_is_something_to_move():
    parts = Parts(prompt=False)
    assert parts.transfers.tick(0) is None
    adapter = parts.manager.add(packed("a"), None)
    parts.manager.acquire(adapter)
    parts.transfers.send()
    parts.mover.work()
    parts.transfers.settle()
    parts.manager.release(adapter)
    parts.clock.advance(0.04)
    assert abs(parts.transfers.tick(0) - 0.06) < 1e-9, "something happened since the last tick"
    parts.clock.advance(0.06)
    assert parts.transfers.tick(0) is None
    parts.clock.advance(5.0)
    assert parts.transfers.tick(0) is None


def test_tick_moves_history_out_of_a_full_device_by_itself():
    parts = Parts(num_pages=8, num_host_pages=8, prompt=False, max_num_batched_tokens=64)
    sequence = parts.add("one", range(32))
    assert parts.step() == {"one": 32}
    parts.scheduler.finish(sequence)
    parts.clock.advance(1.0)
    assert parts.transfers.tick(0) is not None
    assert parts.transfers.busy
    parts.mover.work()
    parts.transfers.settle()
    usage = parts.cache.usage()
    assert usage["host_kv"] > 0
    assert usage["device_free"] > 0


def test_adapter_that_must_be_fetched_holds_no_other_copy_up():
    parts = Parts(prompt=False)
    parts.transfers._copier.fetches = lambda order: (
        isinstance(order, BringAdapter) and "far" in order.content_hash
    )
    movers = [parts.mover]
    parts.transfers._make_mover = lambda on_done: movers.append(HeldMover(on_done)) or movers[-1]
    far, near = (parts.manager.add(packed(name), None) for name in ("far", "near"))
    for adapter in (far, near):
        parts.manager.acquire(adapter)
    parts.transfers.send()
    movers[0].work()
    parts.transfers.settle()
    assert (near.slot is not None, far.slot is not None) == (True, False)
    assert parts.transfers.busy
    movers[1].work()
    parts.transfers.settle()
    assert far.slot is not None
