# SPDX-License-Identifier: Apache-2.0
"""Requests whose first tokens are the base's: steps end at the adapter's start."""

from __future__ import annotations

from moe_lora.cache.pages import BlockTable

from .parts import Parts


def loaded(**settings) -> Parts:
    """With the adapter "a" on the device."""
    parts = Parts({"a": 1}, num_pages=40, **{"max_num_batched_tokens": 100, **settings})
    parts.add("first", range(900, 904), "a", num_answer=1)
    while any(parts.names()):
        parts.step()
    return parts


def add(parts: Parts, name: str, prompt: range, base_tokens: int, **given):
    request = parts.add(name, prompt, "a", **given)
    request.base_tokens, request.table = base_tokens, BlockTable(None)
    return request


def test_a_step_ends_where_the_adapter_starts():
    parts = loaded(max_num_batched_tokens=8)
    add(parts, "one", range(20), 10, num_answer=2)
    assert [parts.step() for _ in range(5)] == [{"one": 8}, {"one": 2}, {"one": 8}, {"one": 2}, {"one": 1}]
    assert parts.names() == ([], [], [])


def test_a_cached_prompt_up_to_the_adapter_s_start_starts_at_once():
    parts = loaded()
    parts.add("base", range(8), num_answer=3)
    parts.step()
    add(parts, "one", range(12), 8, num_answer=3)
    assert parts.step() == {"base": 1, "one": 4}


def test_a_held_request_computes_all_tokens_but_the_last():
    parts = loaded()
    one = add(parts, "one", range(12), 8)
    one.held = True
    assert [parts.step() for _ in range(3)] == [{"one": 8}, {"one": 3}, {}]
    one.held = False
    assert parts.step() == {"one": 1}


def test_a_moved_request_goes_on_after_its_kv():
    parts = loaded()
    one = add(parts, "one", range(12), 8)
    one.awaits_kv = True
    assert parts.step() == {}
    assert parts.scheduler.reserve(one, 11)
    one.table.num_matched, one.awaits_kv = 11, False
    assert parts.step() == {"one": 1}


def test_an_adapter_without_room_stops_no_request_of_the_base():
    parts = Parts({"a": 8, "b": 8}, num_pages=12, max_num_seqs=4)
    parts.add("b", range(4), "b", num_answer=20)
    parts.step()
    add(parts, "one", range(100, 112), 8)
    parts.add("base", range(200, 204), num_answer=1)
    assert "base" in parts.step()
