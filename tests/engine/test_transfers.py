from __future__ import annotations

from .parts import Parts, packed


def test_idle_engine_is_called_again_only_while_there_is_something_to_move():
    parts = Parts(prompt=False)
    assert parts.transfers.tick(0) is None
    adapter = parts.residency.add(packed("a"), None)
    parts.residency.acquire(adapter)
    parts.transfers.send()
    parts.mover.work()
    parts.transfers.settle()
    parts.residency.release(adapter)
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
