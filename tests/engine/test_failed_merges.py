# SPDX-License-Identifier: Apache-2.0
"""An error while an adapter is merged costs at most its merging: tokens and weights stay right."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from itertools import product

import pytest

from moe_lora import LLM
from moe_lora.engine.merging.merged_weights import MergedWeights, RoundingErrors
from moe_lora.models.weight_merge import WeightMerge
from moe_lora.policies.merging.merging import MergedOnly
from tests.engine.merging.test_merging import GREEDY, EveryMode, ask, expected_of, start, use
from tests.engine.ranks.faulty_follower import use_faulty_followers
from tests.engine.test_host_assisted import lora_server
from tests.grids import with_quick
from tests.models.conftest import served  # noqa: F401  (the fixture)

FIRST, SECOND = 0, 1
QUICK = (("fold_in", "llama", 1), ("take_out", "mixtral", 3))


def alone(llm: LLM, model, slot: int) -> tuple[int, ...]:
    [completion] = llm.generate([[5, 6, 7]], [model.adapters[slot].name], GREEDY)
    return completion.token_ids


def load_again(llm: LLM, path) -> None:
    llm.client.start_call("load_adapter", path.name, str(path), True, None).result()


class FailsLater:
    """A method that raises at some calls for one adapter, after the real method did its work or a part."""

    def __init__(self, monkeypatch, owner, name: str, fails) -> None:
        real, self.num_raised = getattr(owner, name), 0

        def method(this, *args, **kwargs):
            found = real(this, *args, **kwargs)
            if fails(this, *args):
                self.num_raised += 1
                raise MemoryError("no room for a copy")
            return found

        monkeypatch.setattr(owner, name, method)


def half_written(monkeypatch, name: str, number: int) -> list[int]:
    """Have the call of this number of `name` spoil a part of its rows, then raise."""
    real, calls = getattr(WeightMerge, name), []

    def method(merge, piece, held):
        calls.append(1)
        if len(calls) != number:
            return real(merge, piece, held)
        real(merge, piece, held)
        merge.merged[piece] = name == "take_out"
        merge._weights[piece].view(-1)[:3] = 7.0
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(WeightMerge, name, method)
    return calls


@pytest.mark.parametrize(
    ("name", "family", "number"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in product(("fold_in", "take_out"), ("llama", "mixtral"), (1, 3))
    ],
)
def test_merge_that_fails_half_way_leaves_exact_weights_and_all_tokens(
    name,
    family,
    number,
    served,  # noqa: F811
    monkeypatch,
    caplog,
):
    model = served(family)
    use(monkeypatch, EveryMode(2))
    with start(model) as llm:  # verified: wrong weights end the engine
        calls = half_written(monkeypatch, name, number)
        with caplog.at_level(logging.ERROR):
            answered = ask(llm, model)
            assert answered == expected_of(model, answered)
        assert len(calls) >= number
        assert sum("is not merged any more" in text for text in caplog.messages) == 1
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        stats = llm.stats()
        assert stats.merges > 0, "the other adapters are merged as before"


def test_adapter_whose_merge_failed_is_merged_again_after_its_next_load(served, monkeypatch):  # noqa: F811
    model = served("llama")
    use(monkeypatch, MergedOnly())
    with start(model) as llm:
        right = alone(llm, model, SECOND)
        with monkeypatch.context() as patch:
            half_written(patch, "fold_in", 2)
            unmerged = alone(llm, model, FIRST)
        before = llm.stats().merges
        assert alone(llm, model, FIRST) == unmerged
        assert llm.stats().merges == before
        assert alone(llm, model, SECOND) == right
        path = model.adapters[FIRST]
        load_again(llm, path)
        before = llm.stats().merges
        assert alone(llm, model, FIRST) == unmerged
        assert llm.stats().merges == before + 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RoundingErrors, "of"),
        pytest.param(MergedWeights, "pieces", marks=pytest.mark.slow),
        pytest.param(WeightMerge, "pieces", marks=pytest.mark.slow),
    ],
)
def test_error_before_an_adapter_is_merged_keeps_it_unmerged(owner, name, served, monkeypatch, caplog):  # noqa: F811
    model = served("llama")
    use(monkeypatch, EveryMode(2))
    with start(model) as llm:
        failing = FailsLater(monkeypatch, owner, name, lambda *_: True)
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        assert failing.num_raised
        stats = llm.stats()
        assert stats.merges == 0 < stats.steps_unmerged
    failures = [text for text in caplog.messages if "is not merged any more" in text]
    assert len(failures) == len(set(failures)) > 0, "one line for each adapter"


@pytest.mark.parametrize("name", with_quick(("decide", "took", "forget"), ("decide",)))
def test_policy_that_fails_switches_merging_off_with_one_line(name, served, monkeypatch, caplog):  # noqa: F811
    model = served("llama")
    policy = EveryMode(2, at_once=True)
    use(monkeypatch, policy)
    with start(model) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        assert llm.stats().merges > 0

        def fail(*_, **__):
            raise ZeroDivisionError("a policy divides by zero")

        setattr(policy, name, fail)
        if name == "forget":
            path = model.adapters[FIRST]
            load_again(llm, path)
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        before = llm.stats()
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        stats = llm.stats()
        assert stats.merges == before.merges
        assert stats.steps_merged + stats.steps_mixed == before.steps_merged + before.steps_mixed
        assert stats.merges == stats.unmerges
    assert sum("merging is off" in text for text in caplog.messages) == 1


def test_merge_that_fails_on_rank_0_is_undone_on_all_ranks(served, monkeypatch):  # noqa: F811
    model = served("mixtral")
    use(monkeypatch, EveryMode(2))
    with start(model, expert_parallel=2) as llm:
        half_written(monkeypatch, "fold_in", 3)  # of this process alone
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        assert llm.stats().merges > 0


@pytest.mark.slow
def test_merge_that_fails_on_a_follower_is_undone_on_all_ranks(served, monkeypatch):  # noqa: F811
    model = served("mixtral")
    use(monkeypatch, EveryMode(2))
    use_faulty_followers(monkeypatch, {"fold": 1})
    with start(model, expert_parallel=2) as llm:
        for _ in range(2):
            answered = ask(llm, model)
            assert answered == expected_of(model, answered)
        assert llm.stats().merges > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fold_in", "take_out"])
def test_beside_a_lora_server_a_failed_merge_leaves_deltas_to_the_server(name, served, monkeypatch):  # noqa: F811
    model = served("llama")
    use(monkeypatch, EveryMode(2))
    with ExitStack() as ends:
        server, _ = ends.enter_context(lora_server(model, sites="all", num_ranks=1))
        llm = ends.enter_context(start(model, lora_server=server, num_threads=1))
        calls = half_written(monkeypatch, name, 2)
        for _ in range(2):
            answered = ask(llm, model)
            assert answered == expected_of(model, answered)
        assert len(calls) > 2
        assert llm.stats().merges > 0


def test_weights_that_can_not_be_restored_end_the_engine(served, monkeypatch):  # noqa: F811
    model = served("llama")
    use(monkeypatch, MergedOnly())
    with start(model) as llm:
        half_written(monkeypatch, "fold_in", 2)

        def fail(merge):
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(WeightMerge, "restore", fail)
        with pytest.raises(Exception, match="no room for a copy"):
            alone(llm, model, FIRST)
