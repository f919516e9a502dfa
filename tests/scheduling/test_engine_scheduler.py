# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from moe_lora.cache.pages import BlockTable
from tests.engine.parts import Parts, packed


def test_equal_prompt_reuses_computed_blocks_of_its_adapter_version_only():
    parts = Parts()
    adapter = parts.manager.add(packed("a"), None)
    parts.add("first", range(9), adapter)
    parts.step()
    parts.add("again", range(9), adapter)
    assert parts.step()["again"] == 1
    parts.add("base", range(9))
    assert parts.step()["base"] == 9


def test_only_waiting_for_an_adapters_place_counts_as_that():
    parts = Parts(max_loras=1, max_num_seqs=3)
    first, second = (parts.manager.add(packed(name), None) for name in ("first", "second"))
    running = [parts.add(name, range(3), first) for name in ("one", "two")]
    held_back = parts.add("three", range(3), second)
    parts.step()
    for name in ("four", "five"):
        running.append(parts.add(name, range(3), first))
    parts.clock.advance(1.0)
    parts.step()
    crowded = running[-1]
    assert crowded in parts.scheduler.waiting, "three run already"
    assert (parts.scheduler.num_waiting, parts.scheduler.num_deferred) == (2, 1), (
        "the crowded one waits for room"
    )
    parts.scheduler.finish(running.pop(0))
    parts.clock.advance(1.0)
    parts.step()
    assert crowded in parts.scheduler.running
    assert (crowded.timing(9.0).queue_s, crowded.timing(9.0).adapter_wait_s) == (2.0, 0.0)
    for sequence in running:
        parts.scheduler.finish(sequence)
    parts.clock.advance(1.0)
    parts.step()
    assert held_back.timing(9.0).adapter_wait_s == 3.0
    assert held_back.timing(9.0).queue_s == 3.0


def test_request_waits_while_every_slot_is_taken_and_others_pass_it():
    parts = Parts(max_loras=1)
    first, second = (parts.manager.add(packed(name), None) for name in ("first", "second"))
    running = parts.add("one", range(3), first)
    parts.add("two", range(3), second)
    parts.add("three", range(3), first)
    assert set(parts.step()) == {"one", "three"}
    parts.scheduler.finish(running)
    assert set(parts.step()) == {"three"}
    parts.scheduler.finish(parts.scheduler.running[0])
    assert set(parts.step()) == {"two"}


def test_starving_request_gets_the_slot_before_younger_ones():
    parts = Parts(max_loras=1, starvation_s=1.0)
    first, second = (parts.manager.add(packed(name), None) for name in ("first", "second"))
    running = parts.add("one", range(3), first)
    parts.step()
    parts.add("two", range(3), second)
    parts.clock.advance(2.0)
    parts.add("three", range(3), first)
    assert set(parts.step()) == {"one"}
    parts.scheduler.finish(running)
    assert set(parts.step()) == {"two"}


def test_waiting_request_that_leaves_frees_its_retired_adapter():
    parts = Parts(max_loras=1, max_num_seqs=1)
    adapter = parts.manager.add(packed("a"), None)
    running = parts.add("one", range(3), adapter)
    waiting = parts.add("two", range(3), adapter)
    parts.step()
    parts.manager.remove("a")
    parts.scheduler.finish(running)
    assert adapter.num_waiting == 1
    parts.scheduler.finish(waiting)
    assert adapter.slot is None
    assert list(parts.manager.resident()) == []


def test_request_whose_adapter_is_on_its_way_waits_alone():
    parts = Parts(prompt=False)
    adapter = parts.manager.add(packed("a"), None)
    parts.add("base", range(3))
    parts.step()
    waiting = parts.add("one", range(10, 13), adapter)
    for _ in range(3):
        parts.clock.advance(0.5)
        assert set(parts.step()) == {"base"}
    assert parts.scheduler.loading == [waiting]
    parts.mover.work()
    assert set(parts.step()) == {"base", "one"}
    timing = waiting.timing(parts.clock.now_s())
    assert (timing.queue_s, timing.adapter_load_s, timing.kv_load_s) == (0.5, 1.0, 0.0)
    assert parts.scheduler.num_adapter_misses == 1


def test_history_on_the_host_comes_back_while_others_run():
    parts = Parts(num_pages=6, num_host_pages=8, prompt=False, policy="lru", max_num_batched_tokens=32)
    prompt = range(13)
    first = parts.add("first", prompt)
    parts.step()
    parts.scheduler.finish(first)
    parts.clock.advance(1.0)
    table = BlockTable(None)
    assert parts.cache.grow(table, 12, parts.clock.now_s())
    parts.step()
    parts.mover.work()
    parts.transfers.settle()
    assert parts.cache.grow(table, 24, parts.clock.now_s())
    parts.cache.release(table, parts.clock.now_s())
    assert parts.cache.usage()["host_kv"] == 3
    parts.add("other", range(50, 52))
    parts.step()
    again = parts.add("again", prompt)
    parts.clock.advance(0.25)
    assert set(parts.step()) == {"other"}
    parts.clock.advance(0.5)
    assert set(parts.step()) == {"other"}
    parts.mover.work()
    assert parts.step() == {"other": 1, "again": 1}
    timing = again.timing(parts.clock.now_s())
    assert (timing.queue_s, timing.adapter_load_s, timing.kv_load_s) == (0.25, 0.0, 0.5)


def test_client_that_leaves_while_its_adapter_comes_gives_all_back():
    parts = Parts(prompt=False)
    adapter = parts.manager.add(packed("a"), None)
    waiting = parts.add("one", range(3), adapter)
    parts.step()
    parts.scheduler.finish(waiting)
    assert (adapter.num_running, adapter.num_waiting, parts.scheduler.num_waiting) == (0, 0, 0)
    parts.mover.work()
    assert parts.step() == {}
    assert adapter.slot is not None, "it is there for the next one"


def test_younger_loading_request_gives_its_room_to_an_older_one():
    parts = Parts(num_pages=7, room_pages=4, prompt=False, max_num_batched_tokens=32)
    old, young = (parts.manager.add(packed(name, num_pages=2), None) for name in ("old", "young"))
    first = parts.add("first", range(16), old)
    second = parts.add("second", range(50, 54), young)
    parts.step()
    assert parts.scheduler.loading == [first, second]
    parts.mover.work(1)
    assert parts.step() == {}
    parts.mover.work()
    assert parts.step() == {"first": 16}
    assert list(parts.scheduler.waiting) == [second]
    assert young.slot is None


def test_adapter_load_after_a_preemption_is_no_part_of_the_first_wait(monkeypatch):
    parts = Parts(num_pages=6, kv_pages=4, max_num_batched_tokens=32)
    adapter = parts.manager.add(packed("a"), None)
    bring_now = parts.manager.bring_now

    def slowly():
        parts.clock.advance(2.0)
        bring_now()

    parts.manager.bring_now = slowly
    old = parts.add("old", range(8))
    young = parts.add("young", range(50, 58), adapter)
    parts.step()
    parts.step()
    assert parts.scheduler.num_preemptions == 1
    parts.scheduler.finish(old)
    parts.step()
    timing = young.timing(parts.clock.now_s())
    assert (timing.adapter_load_s, timing.queue_s, timing.num_preemptions) == (0.0, 2.0, 1)


def test_request_whose_adapter_fails_to_load_waits_again_and_others_go_on():
    parts = Parts(prompt=False)
    broken, sound = (parts.manager.add(packed(name), None) for name in ("broken", "sound"))
    lost = parts.add("lost", range(3), broken)
    parts.add("fine", range(3), sound)
    parts.step()
    parts.break_copies(1)
    parts.mover.work()
    assert parts.step() == {"fine": 3}
    assert broken.slot is None
    parts.mover.work()
    assert "lost" in parts.step()
    assert lost in parts.scheduler.running


def test_request_whose_history_fails_to_come_computes_it_again():
    parts = Parts(num_pages=6, num_host_pages=8, prompt=False, policy="lru", max_num_batched_tokens=32)
    first = parts.add("first", range(13))
    parts.step()
    parts.scheduler.finish(first)
    table = BlockTable(None)
    assert parts.cache.grow(table, 12, parts.clock.now_s())
    parts.clock.advance(1.0)
    parts.step()
    parts.mover.work()
    parts.transfers.settle()
    assert parts.cache.grow(table, 24, parts.clock.now_s())
    parts.cache.release(table, parts.clock.now_s())
    again = parts.add("again", range(13))
    assert parts.step() == {}
    assert again.table.arriving
    parts.break_copies(1)
    parts.mover.work()
    assert parts.step() == {"again": 13}
