# SPDX-License-Identifier: Apache-2.0
"""Small systems whose times can be worked out by hand: steps of 0.1 s, whatever is in the batch."""

from dataclasses import replace

import pytest

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import RoundRobin
from moe_lora.provision.replayed.system import simulate

from .systems import asked, coupled, flat_profile, served, server


def run(config, requests):
    return sorted(simulate(config, requests).requests, key=lambda request: request.index)


def test_prefetched_adapters_are_there_and_the_last_of_them_goes_first() -> None:
    config = served(server(2, prefetched=["b", "a"]), load_s=0.5)
    taken = simulate(config, asked((0.0, "c", 1), (2.0, "b", 1)))
    assert taken.num_loads == 1
    assert [request.finish_s for request in taken.requests] == pytest.approx([0.6, 2.1])
    assert simulate(config, asked((0.0, "c", 1), (2.0, "a", 1))).num_loads == 2


def test_more_prefetched_adapters_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefetched=3 adapters exceed capacity=2; name fewer"):
        server(2, prefetched=["a", "b", "c"])


def test_second_adapter_waits_for_the_only_slot_and_then_for_its_load():
    first, second = run(coupled(1, load_s=0.05), asked((0.0, "a", 2), (0.05, "b", 1)))
    # Load until 0.05, steps until 0.15 and 0.25; then b's load until 0.30 and one step.
    assert (first.admitted_s, first.first_token_s, first.finish_s) == pytest.approx((0.05, 0.15, 0.25))
    assert (second.admitted_s, second.first_token_s) == pytest.approx((0.30, 0.40))
    assert second.decode_ttft_s == pytest.approx(0.35)
    assert (first.at_once, second.at_once) == (True, False)


def test_a_request_whose_adapter_is_there_passes_one_that_waits_for_a_slot():
    requests = run(coupled(1), asked((0.0, "a", 5), (0.01, "b", 1), (0.02, "a", 1)))
    assert [request.first_token_s for request in requests] == pytest.approx([0.1, 0.6, 0.2])
    assert [request.at_once for request in requests] == [True, False, True]


@pytest.mark.parametrize("place", [coupled, lambda capacity, **limits: served(server(capacity), **limits)])
def test_what_a_request_waited_for_is_told_apart(place):
    # "b" finds no slot; then "a" has one, but KV or the batch is full; the last one finds all it needs.
    for limits in ({"kv_tokens": 12}, {"max_num_seqs": 2}):
        arrivals = asked((0.0, "a", 5), (0.01, "b", 1), (0.12, "a", 4), (0.13, "a", 3), (2.0, "a", 1))
        requests = run(place(1, **limits), arrivals)
        assert [request.at_once for request in requests] == [True, False, True, False, True]
        assert [request.waited_for_adapter for request in requests] == [False, True, False, False, False]
        summary = simulate(place(1, **limits), arrivals).summary()
        assert (summary["waited_for_adapter"], summary["waited_for_room"]) == pytest.approx((0.2, 0.2))


def test_batch_limit_lets_requests_in_one_by_one():
    requests = run(coupled(1, max_num_seqs=1), asked(*[(0.0, None, 1)] * 3))
    assert [request.finish_s for request in requests] == pytest.approx([0.1, 0.2, 0.3])
    assert [request.at_once for request in requests] == [True, False, False]


def test_requests_wait_for_kv_in_order_of_arrival():
    config = coupled(1, kv_tokens=10)
    requests = run(config, asked((0.0, None, 5), (0.0, None, 4), (0.0, None, 1), prompt_tokens=2))
    # 7 of 10 tokens are taken; the second needs 6 and holds up the third, which would fit.
    assert [request.first_token_s for request in requests] == pytest.approx([0.1, 0.6, 0.6])


def test_a_request_too_long_for_kv_is_refused():
    with pytest.raises(CapacityError, match="needs 11 tokens of KV, an instance has 10"):
        simulate(coupled(1, kv_tokens=10), asked((0.0, None, 9), prompt_tokens=2))


def test_least_recently_used_adapter_leaves():
    config = coupled(2, load_s=0.01)
    requests = run(
        config,
        asked((0.0, "a", 1), (1.0, "b", 1), (2.0, "a", 1), (3.0, "c", 1), (4.0, "a", 1), (5.0, "b", 1)),
    )
    loaded = [request.admitted_s > request.arrival_s for request in requests]
    assert loaded == [True, True, False, True, False, True]


def test_adapters_load_as_long_as_their_own_bytes_take():
    config = replace(coupled(2), adapter_bytes={"a": 0.3, "b": 0.05})
    requests = run(config, asked((0.0, "a", 1), (2.0, "b", 1)))
    assert [request.decode_ttft_s for request in requests] == pytest.approx([0.4, 0.15])
    with pytest.raises(ConfigError, match="adapter_bytes has no 'c'"):
        simulate(config, asked((0.0, "c", 1)))


def test_shortest_first_takes_the_shortest_of_those_that_wait():
    config = coupled(1, max_num_seqs=1, shortest_first=True)
    requests = run(config, asked((0.0, None, 1), (0.01, None, 5), (0.02, None, 2)))
    assert [request.finish_s for request in requests] == pytest.approx([0.1, 0.8, 0.3])


@pytest.mark.parametrize(("layer_wise", "first_token_s"), [(True, 0.9), (False, 1.2)])
def test_layer_wise_loading_overlaps_the_first_step(layer_wise, first_token_s):
    profile = flat_profile(0.1)
    config = served(server(1, layer_wise=layer_wise), load_s=0.8, profile=profile, num_layers=4)
    (request,) = run(config, asked((0.0, "a", 1)))
    assert request.first_token_s == pytest.approx(first_token_s)


def test_an_instance_hears_of_its_lease_a_round_trip_later_and_steps_without_the_request():
    requests = run(served(server(2, control_s=0.03)), asked((0.0, "a", 3), (0.05, "b", 1)))
    # a: heard of at 0.03, steps to 0.13, 0.23, 0.33; b: asked for at 0.13, so it joins the step from 0.23.
    assert [request.first_token_s for request in requests] == pytest.approx([0.13, 0.33])
    assert all(request.at_once for request in requests)


def test_an_adapter_on_the_server_serves_all_instances_in_one_slot():
    config = served(server(1), num_instances=2)
    requests = run(config, asked((0.0, "a", 2), (0.0, "a", 2), (0.01, "b", 1)))
    assert [request.instance for request in requests[:2]] == [0, 1]
    assert [request.first_token_s for request in requests] == pytest.approx([0.1, 0.1, 0.3])


def test_a_server_busy_with_all_instances_slows_their_steps():
    profile = StepProfile(attention=StageTime(fixed_s=0.1), lora=StageTime(fixed_s=0.08))
    alone, pair = (
        run(served(server(1), num_instances=count, profile=profile), asked(*[(0.0, "a", 10)] * count))
        for count in (1, 2)
    )
    assert alone[0].finish_s == pytest.approx(10 * 0.18)
    assert all(request.finish_s == pytest.approx(10 * 0.18) for request in pair)  # 2 x 0.08 < 0.18
    three = run(served(server(1), num_instances=3, profile=profile), asked(*[(0.0, "a", 10)] * 3))
    # Each plans its step when it begins: the first two before the third has begun.
    assert [request.tpot_s for request in three] == pytest.approx([0.24] * 3)


def test_prompts_are_computed_in_chunks_where_prefill_is_here():
    config = coupled(1, prefill=StageTime(per_row_s=0.01), max_num_batched_tokens=8)
    (request,) = run(config, asked((0.0, "a", 2), prompt_tokens=10))
    assert request.first_token_s == pytest.approx(0.08 + 0.02)
    assert request.finish_s == pytest.approx(0.2)
    assert request.decode_ttft_s == pytest.approx(0.1)


def test_routers_of_the_real_front_end_choose_the_instance():
    plan = asked((0.0, "a", 1), (0.0, "b", 1), (0.0, "a", 1), (0.0, "a", 1))
    config = coupled(1, num_instances=2)
    table = {"a": [(1, 1.0)], "b": [(0, 1.0)]}
    for router, expected in ((RoundRobin, [0, 1, 0, 1]), (lambda: PhiRouting(table), [1, 0, 1, 1])):
        requests = run(replace(config, router=router), plan)
        assert [request.instance for request in requests] == expected
