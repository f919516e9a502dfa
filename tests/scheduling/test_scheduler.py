# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from moe_lora.cache.orders import Readiness
from moe_lora.cache.pages import BlockTable
from moe_lora.policies.admission.host_start import HostLoads, HostStart
from moe_lora.timing.host_times import ColdAdapter, HostTimes, PartTime

from .parts import BLOCK_SIZE, Parts


def test_prompts_are_prefilled_then_decoded_token_by_token():
    parts = Parts()
    parts.add("a", range(5))
    parts.add("b", range(10, 13))
    assert parts.step() == {"a": 5, "b": 3}
    assert parts.step() == {"a": 1, "b": 1}


def test_long_prompt_is_prefilled_in_chunks_beside_decoding_ones():
    parts = Parts(max_num_batched_tokens=8)
    parts.add("short", range(3))
    parts.add("long", range(100, 118))
    assert parts.step() == {"short": 3, "long": 5}
    assert parts.step() == {"short": 1, "long": 7}
    assert parts.step() == {"short": 1, "long": 6}
    assert parts.step() == {"short": 1, "long": 1}


def test_no_more_sequences_run_than_allowed():
    parts = Parts(max_num_seqs=2)
    for name in "abc":
        parts.add(name, range(3))
    assert set(parts.step()) == {"a", "b"}
    parts.scheduler.finish(parts.scheduler.running[0])
    assert set(parts.step()) == {"b", "c"}


def test_only_sequences_of_chosen_adapters_compute_and_others_keep_their_pages():
    parts = Parts({"a": 1, "b": 1})
    for name, adapter in (("one", "a"), ("two", "b"), ("three", None)):
        parts.add(name, range(3), adapter)
    parts.step()
    parts.step()
    parts.add("four", range(20, 23), "b")
    parts.add("five", range(30, 33), "a")
    three, _, two = parts.scheduler.running  # the base model has no adapter to wait for
    pages = [list(sequence.table.pages) for sequence in (three, two)]
    assert parts.step(frozenset("a")) == {"one": 1, "five": 3}
    assert sorted(parts.names()[0]) == ["five", "one", "three", "two"]
    assert [list(sequence.table.pages) for sequence in (three, two)] == pages
    assert parts.step(frozenset({"b", None})) == {"two": 1, "three": 1, "four": 3}
    assert set(parts.step()) == {"one", "two", "three", "five"}, "max_num_seqs, the oldest first"
    assert parts.scheduler.num_preemptions == 0


def test_where_none_of_the_chosen_can_compute_everybody_does():
    parts = Parts({"a": 1, "b": 1}, prompt=False)
    parts.add("one", range(3))
    parts.step()
    parts.add("two", range(3), "a")
    assert parts.step(frozenset("a")) == {"one": 1}, "its adapter is on its way"
    assert parts.names() == (["one"], ["two"], [])
    parts.work()
    assert parts.step(frozenset("a")) == {"two": 3}
    assert parts.step(frozenset("b")) == {"one": 1, "two": 1}


def test_youngest_gives_way_when_pages_run_out_and_comes_back():
    parts = Parts(num_pages=6, kv_pages=4, max_num_batched_tokens=32)
    old = parts.add("old", range(8))
    young = parts.add("young", range(50, 58))
    assert set(parts.step()) == {"old", "young"}
    assert parts.step() == {"old": 1}
    assert parts.scheduler.num_preemptions == 1
    assert list(parts.scheduler.waiting) == [young]
    parts.scheduler.finish(old)
    assert set(parts.step()) == {"young"}
    assert young.tokens[8] == 7


def test_put_back_request_finds_the_blocks_that_it_computed():
    parts = Parts(num_pages=6, kv_pages=5, max_num_batched_tokens=32)
    old = parts.add("old", range(7))
    young = parts.add("young", range(50, 58))
    parts.step()
    parts.step()
    parts.step()
    assert list(parts.scheduler.waiting) == [young]
    parts.scheduler.finish(old)
    assert parts.step() == {"young": 2}, "two blocks of ten tokens are found"


def test_request_whose_adapter_finds_no_place_is_passed_by_others():
    parts = Parts({"a": 1, "b": 1}, max_adapters=1)
    running = parts.add("one", range(3), "a")
    parts.step()
    parts.add("two", range(3), "b")
    parts.add("three", range(10, 13), "a")
    parts.step()
    assert parts.names() == (["one", "three"], [], ["two"])
    parts.scheduler.finish(running)
    parts.scheduler.finish(parts.scheduler.running[0])
    parts.step()
    assert parts.names() == ([], ["two"], [])


def test_request_that_waits_too_long_for_an_adapters_place_stops_younger_ones():
    parts = Parts({"a": 1, "b": 1}, max_adapters=1, starvation_s=1.0)
    parts.add("one", range(3), "a")
    parts.step()
    parts.add("two", range(3), "b")
    parts.clock.advance(2.0)
    parts.add("three", range(10, 13), "a")
    parts.step()
    assert parts.names() == (["one"], [], ["two", "three"])


def test_oracle_queue_admits_the_request_with_least_to_generate_first():
    parts = Parts(max_num_seqs=1, shortest_first=True)
    parts.add("long", range(4), num_answer=36)
    parts.add("short", range(4), num_answer=2)
    assert list(parts.step()) == ["short"]


def test_oldest_request_waits_with_what_it_has_for_copies_under_way_and_nobody_is_admitted():
    parts = Parts({"old": 2, "young": 2}, num_pages=7, prompt=False, max_num_batched_tokens=32)
    parts.add("first", range(16), "old")
    parts.add("second", range(50, 54), "young")
    parts.step()
    parts.work(1)
    num_loads = parts.cache.counters.adapter_loads
    for _ in range(5):
        assert parts.step() == {}
        assert parts.names() == ([], ["first"], ["second"])
    assert parts.scheduler.num_put_back == 1
    assert parts.cache.counters.adapter_loads == num_loads
    parts.work()
    assert parts.step() == {"first": 16}


def test_running_request_that_is_left_alone_keeps_its_pages_until_copies_are_done():
    parts = Parts({"a": 3}, num_pages=7, prompt=False, max_num_batched_tokens=32)
    parts.add("first", range(16))
    parts.add("second", range(50, 54), "a")
    parts.step()
    assert parts.step() == {}
    assert (parts.names()[0], parts.scheduler.num_preemptions) == (["first"], 0)
    parts.work()
    assert parts.step() == {"first": 1}


def test_copies_that_take_several_steps_each_keep_no_request_from_starting():
    adapters = {"a0": 1, "a1": 3, "a2": 3}
    parts = Parts(adapters, num_pages=9, max_adapters=4, prompt=False, max_num_batched_tokens=64)
    parts.add("oldest", range(24), "a0")
    for number, adapter in enumerate(["a1", "a2"] * 2):
        parts.add(str(number), range(100 * number, 100 * number + 4), adapter)
    for _ in range(20):
        if parts.step():
            break
        parts.work(1)
    assert parts.names()[0] == ["oldest"]
    assert parts.cache.counters.adapter_loads == 3


def test_waits_are_told_apart_by_what_was_missing():
    parts = Parts({"a": 1}, prompt=False)
    request = parts.add("one", range(3), "a")
    parts.clock.advance(0.5)
    parts.step()
    parts.clock.advance(2.0)
    parts.work()
    parts.step()
    waits = request.waits
    assert (waits.queue_s(0.0, 9.0), waits.adapter_load_s, waits.kv_load_s) == (0.5, 2.0, 0.0)
    assert not request.adapter_hit
    assert parts.scheduler.num_adapter_misses == 1


def test_cache_is_told_of_the_queue_only_when_it_changes():
    parts = Parts(max_num_seqs=1)
    told = []
    parts.cache.look_ahead = told.append
    parts.add("one", range(3))
    parts.add("two", range(4))
    for _ in range(3):
        parts.step()
    assert told == [[(None, [0, 1, 2, 3], "")]]
    parts.scheduler.finish(parts.scheduler.running[0])
    parts.step()
    assert told[1:] == [[]]


def test_prompt_of_a_loading_adapter_is_computed_at_once_then_it_waits_alone():
    parts = Parts({"a": 1}, prompt=False, host_tokens=4)
    parts.add("base", range(3))
    cold = parts.add("cold", range(50, 60), "a")
    assert parts.step() == {"base": 3, "cold": 4}, "beside others it has so many tokens"
    assert parts.step() == {"base": 1, "cold": 4}
    assert parts.step() == {"base": 1, "cold": 2}
    for _ in range(3):
        assert parts.step() == {"base": 1}, "its prompt is done"
    parts.work()
    assert parts.step() == {"base": 1, "cold": 1}
    assert cold.cold_tokens == 0
    assert parts.scheduler.num_adapter_misses == 1


def test_last_token_of_a_cold_prompt_is_no_decode_step():
    parts = Parts({"a": 1}, prompt=False, host_tokens=4, max_num_batched_tokens=8)
    parts.add("cold", range(50, 59), "a")
    assert parts.step() == {"cold": 8}
    assert parts.step() == {"cold": 1}
    assert parts.step() == {}


def test_request_that_began_without_its_adapter_starts_over_when_the_load_fails():
    parts = Parts({"a": 1}, prompt=False, host_tokens=4)
    parts.add("cold", range(50, 55), "a")
    assert parts.step() == {"cold": 5}
    parts.cache.failed(parts.orders[0].copy_id)
    assert parts.step() == {"cold": 6}, "prompt and token once more, beside another load"


def test_requests_keep_their_order_when_the_load_that_they_wait_for_fails():
    parts = Parts({"a": 1}, prompt=False)
    for number in range(4):
        parts.add(f"r{number}", range(10 * number, 10 * number + 5), "a")
    assert parts.step() == {}
    assert parts.names()[1] == ["r0", "r1", "r2", "r3"]
    parts.cache.failed(parts.orders[0].copy_id)
    parts.scheduler._look_at_adapters()
    assert parts.names() == ([], [], ["r0", "r1", "r2", "r3"])


def host_start() -> HostStart:
    """A worker is as quick as the device; half a byte a second is loaded."""
    layer = PartTime(fixed_s=1.0)
    times = HostTimes(
        worker={"q": layer},
        device=layer,
        num_layers=2,
        load_fixed_s=0.0,
        load_bytes_per_s=0.5,
        bytes_per_rank=1.0,
        max_tokens=8,
        max_rank=8,
    )
    return HostStart(times=times, num_workers=1, tokens_per_worker=8)


def test_load_whose_request_left_is_over_when_it_ends():
    """The adapter comes, leaves, and is on its way again, ahead of need: the request after that begins on
    the host, as if the first one had never been."""
    loads = HostLoads(host_start(), 16)
    parts = Parts({"a": 2, "b": 3}, num_pages=4, prompt=False, host_tokens=8, host_loads=loads)
    left = parts.add("left", range(3), "a")
    assert parts.step() == {"left": 3}
    parts.scheduler.finish(left)
    parts.work()
    for now_s, name in ((1.0, "b"), (10.0, "a")):
        parts.clock.advance(now_s - parts.clock.now_s())
        parts.step()
        parts.cache.hold(name, now_s)
        parts.cache.let_go(name, now_s)
        parts.step()
        if name == "b":
            parts.work()
    assert parts.cache.readiness("a") is Readiness.LOADING
    parts.add("later", range(10, 13), "a")
    assert parts.step() == {"later": 3}


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 24)),
        st.tuples(st.sampled_from(["step", "work", "fail", "leave"]), st.integers(0, 3), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_cold_requests_that_leave_or_fail_at_any_moment_leave_nothing(actions):
    """Requests leave before, while and after their prompts are on the host; loads fail or come."""
    loads = HostLoads(host_start(), 16)
    sizes = {"a": 1, "b": 2}
    parts = Parts(sizes, num_pages=16, prompt=False, host_tokens=4, host_loads=loads)
    scheduler, held, cold_steps = parts.scheduler, [], 0
    for action, number, length in actions:
        if action == "add":
            adapter = [None, "a", "b"][number]
            held.append(parts.add(f"{len(held)}", range(100 * len(held), 100 * len(held) + length), adapter))
        elif action == "step":
            parts.clock.advance(0.5)
            parts.step()
            cold_steps += any(one.cold_tokens for one in scheduler.running)
        elif action == "work":
            parts.work(number)
        elif action == "fail" and parts.orders:
            parts.cache.failed(parts.orders.popleft().copy_id)
        elif action == "leave" and held:
            scheduler.finish(held.pop(number % len(held)))
    for one in held:
        scheduler.finish(one)
    parts.work()
    parts.step()
    assert parts.names() == ([], [], [])
    table = BlockTable(None)
    assert parts.cache.grow(table, 16 * BLOCK_SIZE, parts.clock.now_s()), "no page is held"
    parts.cache.release(table, parts.clock.now_s())
    for name in sizes:
        loads.begin(name, ColdAdapter(lora_rank=1, num_bytes=1.0), 4, 1000.0, under_way=True)
        assert loads.pays(name, 4, 0, 1000.5), "as the first load of all"
        loads.end(name, 1001.0)
    event("on the host" if cold_steps else "never on the host")


def test_cold_request_that_is_put_back_starts_over():
    parts = Parts({"a": 1}, num_pages=6, kv_pages=4, max_num_batched_tokens=32, prompt=False, host_tokens=32)
    old = parts.add("old", range(8))
    cold = parts.add("cold", range(50, 58), "a")
    assert parts.step() == {"old": 8, "cold": 8}
    assert parts.step() == {"old": 1}
    assert (cold.num_computed, cold.cold_tokens) == (0, 0)
    parts.scheduler.finish(old)
    parts.work()
    computed = [parts.step() for _ in range(3)]
    assert sum(step.get("cold", 0) for step in computed) > 0
    assert cold.num_computed >= 8, "all of its prompt, from the beginning or from what the cache kept"


def test_long_cold_prompt_leaves_shorter_ones_behind_it_their_share():
    parts = Parts({"a": 1, "b": 1}, num_pages=40, prompt=False, host_tokens=4)
    parts.add("base", range(3))
    parts.add("long", range(100, 140), "a")
    assert parts.step() == {"base": 3, "long": 4}
    parts.add("short", range(50, 54), "b")
    parts.step()
    assert parts.step() == {"base": 1, "long": 2, "short": 2}
    assert parts.step() == {"base": 1, "long": 2, "short": 2}
    assert parts.step() == {"base": 1, "long": 4}, "its prompt is done"


@pytest.mark.parametrize("adapter", [None, "b"])
def test_warm_request_begins_in_the_next_step_behind_a_long_cold_prompt(adapter):
    parts = Parts({"a": 1, "b": 1}, num_pages=60, prompt=False, host_tokens=4)
    if adapter is not None:
        first = parts.add("first", range(3), adapter)
        parts.step()
        parts.work()
        parts.step()
        parts.scheduler.finish(first)
    parts.add("cold", range(100, 160), "a")
    assert parts.step() == {"cold": 16}, "alone it has whole steps"
    parts.add("warm", range(30), adapter)
    assert parts.step() == {"cold": 4, "warm": 12}
    assert parts.step() == {"cold": 4, "warm": 12}


def test_request_whose_adapter_just_came_is_one_of_the_others():
    parts = Parts({"a": 1, "b": 1}, num_pages=60, prompt=False, host_tokens=4, max_num_batched_tokens=8)
    parts.add("came", range(50, 60), "b")
    parts.add("cold", range(100, 160), "a")
    assert parts.step() == {"came": 8}
    assert parts.step() == {"came": 2, "cold": 6}
    assert parts.step() == {"cold": 8}, "the first one's prompt is done, and its adapter on its way"
    parts.work(1)
    assert parts.step() == {"came": 1, "cold": 4}


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([None, "cold0", "cold1", "cold2"]), st.integers(1, 20), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    ),
    host_tokens=st.integers(3, 12),
    num_warm=st.integers(1, 20),
)
def test_cold_prompts_end_under_an_endless_stream_of_warm_ones(requests, host_tokens, num_warm):
    """Loads never end.  A step that computes anything warm has no more cold rows than the cap, and after
    those before it every cold prompt gets tokens in each step."""
    parts = Parts(
        {f"cold{number}": 1 for number in range(3)},
        num_pages=400,
        max_num_seqs=64,
        max_num_batched_tokens=32,
        prompt=False,
        host_tokens=host_tokens,
    )
    adapters, left = {}, {}

    def step() -> None:
        parts.add(f"stream{parts.clock.now_s()}", range(1000, 1000 + num_warm), num_answer=1)
        parts.clock.advance(1.0)
        computed = parts.step()
        cold = {name: num for name, num in computed.items() if adapters.get(name) is not None}
        assert len(cold) == len(computed) or sum(cold.values()) <= host_tokens
        for name in cold:
            left[name] -= cold[name]

    for number, (adapter, length, gap) in enumerate(requests):
        for _ in range(gap):
            step()
        adapters[f"one{number}"] = adapter
        if adapter is not None:
            left[f"one{number}"] = length
        parts.add(f"one{number}", range(100 * number, 100 * number + length), adapter, num_answer=1)
    for _ in range(sum(length for _, length, _ in requests) + 8):
        step()
    assert not any(left.values()), "every cold prompt is computed"


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=5),
    host_tokens=st.integers(1, 12),
)
def test_cold_prompts_of_any_lengths_share_the_host(prompts, host_tokens):
    """Beside a decoding request: never more than the cap; from the step after its coming on every prompt that
    is not done gets as much as any other, but for one token of rounding."""
    names = [f"cold{number}" for number in range(len(prompts))]
    parts = Parts(
        {f"{name}'s": 1 for name in names},
        num_pages=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prompt=False,
        host_tokens=host_tokens,
    )
    parts.add("base", range(3), num_answer=1000)
    parts.step()
    known: dict[str, int] = {}
    for name, (length, gap) in zip(names, prompts, strict=True):
        for _ in range(gap):
            _check_cold_step(parts.step(), known, host_tokens)
        parts.add(name, range(100, 100 + length), f"{name}'s")
        first = parts.step()
        _check_cold_step({key: value for key, value in first.items() if key != name}, {}, host_tokens)
        for other in known:
            known[other] -= first.get(other, 0)
        known[name] = length - first.get(name, 0)
    for _ in range(sum(length for length, _ in prompts)):
        _check_cold_step(parts.step(), known, host_tokens)
    assert not any(known.values()), "every prompt is computed"


def _check_cold_step(step: dict[str, int], left: dict[str, int], host_tokens: int) -> None:
    """Take what the step computed from what is left of each prompt."""
    assert step["base"] == 1, "the one that decodes does not wait"
    cold = {name: num for name, num in step.items() if name != "base"}
    assert sum(cold.values()) <= host_tokens
    waiting = {name: cold.get(name, 0) for name, num in left.items() if num > cold.get(name, 0)}
    assert all(share >= max(cold.values(), default=0) - 1 for share in waiting.values())
    for name, num in cold.items():
        if name in left:
            left[name] -= num


def test_without_host_workers_no_shares_of_them_are_made():
    """A schedule asks about a loading adapter twice: whether it is lost, whether its request begins."""
    parts, asked = Parts({"a": 1}, prompt=False), []
    adapters = parts.scheduler._adapters
    readiness = adapters.readiness
    parts.add("warm", range(3))
    parts.add("cold", range(50, 55), "a")
    parts.step()
    adapters.readiness = lambda name: asked.append(name) or readiness(name)
    assert parts.step() == {"warm": 1}
    assert asked == ["a"] * 2
