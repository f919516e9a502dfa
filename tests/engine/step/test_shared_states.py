# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recurrent states: a request reads the state after its prefix, whatever has left the arenas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache.orders import Copy, Readiness
from moe_lora.cache.pages import PRIVATE
from moe_lora.engine.step.unequal_layers import MARKS, StateCache
from moe_lora.policies.caching.caching import CACHING_POLICIES, make_caching_policy
from moe_lora.timing.host_times import CacheCosts

BLOCK, STATE = 2, 3
COSTS = CacheCosts(page_bytes=1 << 20, prefill_tokens_per_s=100.0)


class Request:
    """A prompt that is computed in steps; its state is named by its tokens."""

    def __init__(self, states, namespace, salt, tokens):
        self.states, self.namespace, self.salt, self.tokens = states, namespace, salt, tokens
        self.table, self.num_computed, self.unshared = None, 0, False

    def name(self, num_tokens):
        return (self.namespace, self.salt, tuple(self.tokens[:num_tokens]))

    def start(self):
        cache, now_s = self.states.cache, self.states.now_s
        if cache.hold(self.namespace, now_s) is Readiness.NO_ROOM:
            return False
        self.states.copy()
        self.table = cache.match(self.namespace, self.tokens, now_s, salt=self.salt)
        self.num_computed = self.table.num_matched
        assert self.num_computed < len(self.tokens)
        return True

    def step(self, num_tokens):
        """False without pages."""
        self.states.copy()
        assert self.table.ready
        end = min(len(self.tokens), self.num_computed + num_tokens)
        device = self.states.device
        if end == self.num_computed or not self.states.cache.grow(self.table, end, self.states.now_s):
            return False
        for index in range(self.num_computed // BLOCK):
            assert device[self.table.pages[index]] == self.name((index + 1) * BLOCK)
        columns = self.table.columns(self.num_computed, end)
        after, before, marks = columns[:STATE], columns[STATE : 2 * STATE], columns[2 * STATE :]
        if self.num_computed:
            assert [device[page] for page in before] == [
                (self.name(self.num_computed), i) for i in range(STATE)
            ]
        assert len(marks) <= MARKS * (STATE + 1)
        for index in range(self.num_computed // BLOCK, -(-end // BLOCK)):
            device[self.table.pages[index]] = self.name(min(end, (index + 1) * BLOCK))
        written = [(end, after)]
        written += [(marks[at], marks[at + 1 : at + 1 + STATE]) for at in range(0, len(marks), STATE + 1)]
        for at, pages in written:
            assert self.num_computed < at <= end
            for number, page in enumerate(pages):
                device[page] = (self.name(at), number)
        self.num_computed = end
        if self.unshared:
            self.states.cache.keep_private(self.table)
        else:
            self.states.cache.publish(self.table, self.tokens, end, self.states.now_s)
        return True

    def stop(self):
        self.states.cache.release(self.table, self.states.now_s)
        self.states.cache.let_go(self.namespace, self.states.now_s)


class States:
    """A cache of states, and what its pages would hold."""

    def __init__(self, policy="cost-aware", device_pages=200, host_pages=0, **options):
        self.cache = StateCache(
            num_device_pages=device_pages,
            num_host_pages=host_pages,
            block_size=BLOCK,
            state_pages=STATE,
            policy=make_caching_policy(policy, COSTS),
            **{"prefix_caching": True} | options,
        )
        self.device, self.host, self.now_s = {}, {}, 0.0
        self.cache.add_adapter(1, [1], 0.0)

    def copy(self):
        for order in self.cache.take_orders():
            if isinstance(order, Copy):
                pairs = zip(order.device_pages, order.host_pages, strict=True)
                for on_device, on_host in pairs:
                    if order.to_device:
                        self.device[on_device] = self.host.get(on_host)
                    else:
                        self.host[on_host] = self.device.get(on_device)
            self.cache.copied(order.copy_id)

    def compute(self, tokens, namespace=None, salt="", chunk=1000):
        """A whole prompt; returns its number of matched tokens."""
        request = Request(self, namespace, salt, tokens)
        assert request.start()
        matched = request.num_computed
        while request.num_computed < len(tokens):
            assert request.step(chunk)
        request.stop()
        self.now_s += 1
        return matched

    def check_pages(self, requests=()):
        """Each page has one owner, and all without a request belong to nodes."""
        device, tree = self.cache._mover.device, self.cache._tree
        private = [page for r in requests for page in r.table.pages[r.table.num_shared :]]
        private += [
            page for r in requests for pages in (r.table.state, *r.table.kept.values()) for page in pages
        ]
        assert sorted(private) == np.flatnonzero(device.owner == PRIVATE).tolist()
        nodes = [node for node in tree.columns.nodes if node is not None]
        for node in nodes:
            assert node.device_pages is None or len(node.device_pages) == node.num_pages
            assert not node.is_whole or node.num_pages == STATE
        used = [page for node in nodes for page in node.device_pages or ()] + private
        assert len(set(used)) == len(used) == device.num_pages - device.num_free


PROMPT = list(range(100, 151))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_a_prompt_is_found_up_to_its_last_block(chunk):
    states = States()
    assert states.compute(PROMPT, chunk=chunk) == 0
    assert states.compute(PROMPT, chunk=chunk) == 50
    assert states.compute(PROMPT[:-1], chunk=chunk) == 48
    states.check_pages()


def test_turns_of_a_chat_start_where_the_prompt_before_ended():
    states, tokens = States(), PROMPT[:21]
    found = []
    for turn in range(4):
        found.append(states.compute(tokens))
        tokens = tokens + [1000 * turn + n for n in range(15)]
    assert found == [0, 20, 34, 50]


def test_the_third_prompt_starts_where_the_second_parted_from_the_first():
    states = States()
    first, second, third = (PROMPT[:15] + [tail] * 20 for tail in (7, 8, 9))
    assert [states.compute(one) for one in (first, second, third)] == [0, 0, 14]


def test_long_prompts_leave_snapshots_at_a_spacing():
    states = States()
    states.compute(PROMPT, chunk=7)
    assert states.compute(PROMPT[:33] + [1] * 8) == 30


def test_neither_adapters_nor_salts_share():
    states = States()
    kinds = [(None, ""), (1, ""), (None, "a"), (1, "a")]
    assert [states.compute(PROMPT, *kind) for kind in kinds] == [0] * 4
    assert [states.compute(PROMPT, *kind) for kind in kinds] == [50] * 4
    states.cache.forget(1)
    states.cache.clear_history([None])
    assert states.compute(PROMPT) == 0
    states.cache.evict_all()
    assert states.cache._mover.device.num_free == states.cache._mover.device.num_pages


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"policy": "slora"}], ids=str)
def test_nothing_is_kept_without_history(options):
    states = States(**options)
    assert [states.compute(PROMPT) for _ in range(2)] == [0, 0]
    assert states.cache._mover.device.num_kv == 0


def test_a_preempted_request_restarts_from_its_deepest_snapshot():
    states = States()
    request = Request(states, None, "", PROMPT)
    assert request.start()
    while request.num_computed < 40:
        assert request.step(8)
    request.stop()
    assert states.compute(PROMPT) == 36


def test_a_request_as_large_as_the_arena_uses_its_snapshot_up():
    states = States(device_pages=STATE + 26)
    assert states.compute(PROMPT[:9]) == 0
    assert states.compute(PROMPT) == 8
    states.check_pages()


def test_snapshots_come_back_from_the_host():
    states = States(device_pages=60, host_pages=100, policy="fastlibra", upper=0.0, lower=0.0)
    states.compute(PROMPT[:21])
    for _ in range(10):
        states.cache.tick(states.now_s, 1)
        states.copy()
        states.now_s += 1
    states.compute([7] * 100)
    request = Request(states, None, "", PROMPT)
    assert request.start()
    assert request.table.snapshot.moving_in
    assert not request.table.ready
    states.copy()
    assert request.num_computed == 20
    while request.num_computed < 51:
        assert request.step(10)
    request.stop()
    states.check_pages()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([None, 1]), st.integers(0, 5), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(0, 3), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("stop"), st.integers(0, 3), st.just(0), st.just(0)),
        st.tuples(st.just("tick"), st.just(0), st.just(0), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)
SHARED = [[n] * 6 + [9] * (10 * (n % 2)) + list(range(10)) for n in range(3)]


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    policy=st.sampled_from(sorted(CACHING_POLICIES)),
    device_pages=st.integers(30, 70),
    host_pages=st.sampled_from([0, 40]),
)
def test_each_step_reads_the_state_of_its_tokens(steps, policy, device_pages, host_pages):
    states, requests = States(policy, device_pages, host_pages), []
    for kind, first, second, third in steps:
        states.now_s += 0.05
        if kind == "start" and len(requests) < 4:
            tokens = SHARED[second % 3][: 4 + third] + [second] * (third // 2 + 1)
            request = Request(states, first, "s" if second == 5 else "", tokens)
            if request.start():
                requests.append(request)
        elif kind == "tick":
            states.cache.tick(states.now_s, len(requests))
        elif kind == "step" and first < len(requests):
            requests[first].step(second)
        elif kind == "stop" and first < len(requests):
            requests.pop(first).stop()
        states.check_pages(requests)
    for request in requests:
        request.stop()
    states.copy()
    states.check_pages()
    states.cache.evict_all()
    assert states.cache._mover.device.num_free == device_pages


def test_an_unshared_request_keeps_no_pages_for_snapshots():
    """Not even the snapshot that it has read, or from a step in which it was shared."""
    states = States()
    states.compute(list(range(21)), namespace=1)
    request = Request(states, 1, "", [*range(21), *range(100, 120)])
    assert request.start()
    assert request.table.snapshot is not None
    assert request.step(3)
    for _ in range(4):
        request.unshared = True
        assert request.step(3)
        assert (request.table.kept, request.table.snapshot) == ({}, None)
        states.check_pages([request])
    request.stop()
    states.check_pages()
