# SPDX-License-Identifier: Apache-2.0
"""With an arena so small that swapping never stops, answers are those of a large one."""

from __future__ import annotations

import pickle
import random
import time
from itertools import product

import pytest

from moe_lora import LLM, GenerationError, SamplingParams
from moe_lora.config import CACHE_POLICIES
from moe_lora.core.request import EngineStats
from moe_lora.engine.adapters.copies import RankCopier
from moe_lora.engine.adapters.manager import AdapterManager
from tests.engine.refusals import least_of
from tests.models.conftest import Served, served  # noqa: F401  (the fixture)

NUM_TOKENS, NUM_TURNS, MIN_MARGIN = 10, 3, 1e-4
QUICK = (("cost-aware", 0), ("fastlibra", 2), ("lru", 0))
"""Policies of three kinds; `test_traffic.py` has all."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
Answers = list[tuple[int, ...]]


def settings(model: Served, **changes) -> dict:
    adapters = {path.name: str(path) for path in model.adapters}
    common = {"dtype": "float32", "eager": True, "num_threads": 1, "max_model_len": 128}
    return {"adapters": adapters, **common, **changes}


def least_arena_mb(model: Served) -> float:
    """One request with the largest adapter fits, and hardly anything beside it."""
    too_little = settings(model, arena_mb=1e-3)
    return least_of(lambda: LLM(model.model_dir, **too_little), "one request of max_model_len=128 tokens")


def conversations(llm: LLM, model: Served) -> Answers:
    """Several turns for the base and for each adapter, twice; all prompts begin alike, each turn's with the
    turns before it.
    """
    rng = random.Random(7)
    names = [None, *(path.name for path in model.adapters)] * 2
    opening = [rng.randrange(3, 96) for _ in range(20)]
    histories = [opening + [rng.randrange(3, 96) for _ in range(rng.randint(5, 25))] for _ in names]
    answers: Answers = []
    for _ in range(NUM_TURNS):
        for history, completion in zip(histories, llm.generate(histories, names, GREEDY), strict=True):
            margins = [chosen.top[0][1] - chosen.top[1][1] for chosen in completion.logprobs]
            assert min(margins) > MIN_MARGIN, "a near tie may fall either way; choose another seed"
            answers.append(completion.token_ids)
            history += [*completion.token_ids, *(rng.randrange(3, 96) for _ in range(4))]
    return answers


@pytest.fixture(scope="module")
def expected(served) -> tuple[Served, float, Answers]:  # noqa: F811
    """The model, its smallest arena, and what a large one answers."""
    model = served("mixtral")
    with LLM(model.model_dir, **settings(model)) as llm:
        answers = conversations(llm, model)
        assert llm.stats().adapter_evictions == 0
    return model, least_arena_mb(model), answers


def under_pressure(expected: tuple[Served, float, Answers], **changes) -> EngineStats:
    """Answers in the smallest arena, compared; the engine's figures."""
    model, arena_mb, answers = expected
    changes = {"arena_mb": arena_mb, "swap_interval_s": 0.005, **changes}
    with LLM(model.model_dir, **settings(model, **changes)) as llm:
        assert conversations(llm, model) == answers
        stats = llm.stats()
    assert stats.adapter_evictions > 0
    assert stats.device_bytes <= changes["arena_mb"] * 1e6
    assert stats.device_kv_bytes + stats.device_adapter_bytes <= stats.device_bytes
    return stats


@pytest.mark.parametrize(
    ("policy", "host_arena_mb"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in product(CACHE_POLICIES, (2, 0))
    ],
)
def test_answers_are_those_of_a_large_arena(policy, host_arena_mb, expected):
    stats = under_pressure(expected, cache_policy=policy, host_arena_mb=host_arena_mb)
    assert (stats.swapped_out_bytes > 0) == (host_arena_mb > 0)


@pytest.mark.slow
@pytest.mark.parametrize("host_arena_mb", [0, 2])
def test_answers_of_several_ranks_are_those_of_a_large_arena(host_arena_mb, expected):
    stats = under_pressure(expected, expert_parallel=2, host_arena_mb=host_arena_mb)
    assert (stats.swapped_out_bytes > 0) == (host_arena_mb > 0)


@pytest.mark.parametrize("policy", [pytest.param("cost-aware", marks=pytest.mark.slow), "fastlibra"])
def test_copies_that_come_late_change_no_answer(policy, expected, monkeypatch):
    begin = RankCopier.begin
    rng = random.Random(1)

    def begin_late(copier, order):
        steps, delay_s = begin(copier, order), rng.choice([0.0, 0.01, 0.05])

        def late():
            for num_bytes in steps:
                time.sleep(delay_s)
                yield num_bytes

        return late()

    monkeypatch.setattr(RankCopier, "begin", begin_late)
    under_pressure(expected, cache_policy=policy, host_arena_mb=1, arena_mb=1.5 * expected[1])


def test_copy_that_fails_ends_the_requests_that_need_it_and_no_others(expected, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")
        yield

    model, _, _ = expected
    name = model.adapters[0].name
    with LLM(model.model_dir, **settings(model)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(RankCopier, "_bring", fail)
            with pytest.raises(GenerationError, match=f"prompt 0 of 2 failed: adapter {name!r}") as caught:
                llm.generate([[5, 6, 7]] * 2, [name, None], GREEDY)
            lost, base = caught.value.completions
            assert caught.value.problems.keys() == {0}
            assert not llm.list_adapters()[0].pinned
            assert llm.pin_adapter(name).pinned
        assert (lost.finish_reason, base.finish_reason) == ("error", "length")
        # Requests are refused in the pause before the next load, and leave the others of the call alone.
        for _ in range(600):
            try:
                again = llm.generate([[5, 6, 7]] * 2, [name, None], GREEDY)
            except GenerationError as error:
                again = list(error.completions)
            assert again[1].finish_reason == "length"
            if again[0].finish_reason == "length":
                break
            time.sleep(0.1)
        assert again[0].finish_reason == "length"


def test_pinned_adapter_is_replaced_time_and_again(expected):
    model, _, _ = expected
    first, second, *_ = model.adapters
    with LLM(model.model_dir, **settings(model)) as llm:
        llm.pin_adapter(first.name)
        for number in range(10):
            llm.publish_adapter(first.name, str((first, second)[number % 2]))
        answer = llm.generate([5, 6, 7], first.name, GREEDY)[0]
        assert answer.token_ids == llm.generate([5, 6, 7], second.name, GREEDY)[0].token_ids
        assert {info.residency for info in llm.list_adapters() if info.name == first.name} == {"device"}


def test_request_that_finds_no_room_for_ever_ends_with_an_error_and_others_go_on(expected, monkeypatch):
    model, _, _ = expected
    pinned, other, *_ = (path.name for path in model.adapters)
    monkeypatch.setattr(AdapterManager, "_check_pin", lambda *_: None)
    with LLM(model.model_dir, **settings(model, max_loras=1)) as llm:
        assert llm.pin_adapter(pinned).pinned
        with pytest.raises(GenerationError, match="prompt 1 of 3 failed: there is no room") as caught:
            llm.generate([[5, 6, 7]] * 3, [pinned, other, None], GREEDY)
        assert [one.finish_reason for one in caught.value.completions] == ["length", "error", "length"]
        assert caught.value.completions[1].token_ids == ()
        copied = pickle.loads(pickle.dumps(caught.value))
        assert (str(copied), copied.completions) == (str(caught.value), caught.value.completions)
        assert not llm.pin_adapter(pinned, pinned=False).pinned
        assert llm.generate([5, 6, 7], other, GREEDY)[0].finish_reason == "length"


def test_residency_tells_the_tier_that_an_adapter_is_in(expected):
    model, arena_mb, _ = expected
    names = [path.name for path in model.adapters]
    with LLM(model.model_dir, **settings(model, arena_mb=arena_mb, host_arena_mb=2)) as llm:
        assert {info.residency for info in llm.list_adapters()} == {"disk"}
        for name in names:
            llm.generate([5, 6, 7], name, GREEDY)
        found = {info.name: info for info in llm.list_adapters()}
        last = found[names[-1]]
        assert (last.residency, last.num_pages > 0, last.idle_s is not None) == ("device", True, True)
        assert {info.residency for info in found.values()} <= {"device", "host", "disk"}
        assert any(info.num_pages == 0 for info in found.values())
    with LLM(model.model_dir, **settings(model)) as llm:
        assert {info.residency for info in llm.list_adapters()} == {"host"}


def test_base_and_adapters_share_no_history(expected):
    model, arena_mb, _ = expected
    prompt = list(range(3, 60))
    with LLM(model.model_dir, **settings(model, arena_mb=4 * arena_mb)) as llm:
        first = llm.generate(prompt, None, GREEDY)[0]
        assert llm.generate(prompt, None, GREEDY)[0].num_cached_tokens == 48
        other = llm.generate(prompt, model.adapters[1].name, GREEDY)[0]
        assert (other.num_cached_tokens, other.token_ids != first.token_ids) == (0, True)
