# SPDX-License-Identifier: Apache-2.0
"""Answers under `on_publish="switch"`: each token is peft's by the version that it names."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_lora import LLM, SamplingParams
from moe_lora.adapters.host_store import HostStore
from moe_lora.config import EngineConfig
from moe_lora.core.request import BACKGROUND, GenerateRequest, TokenOutput
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.adapters.copies import RankCopier
from moe_lora.engine.build import build_engine
from moe_lora.engine.core import EngineCore
from moe_lora.engine.text.grammars import json_grammar
from moe_lora.families import shape_of
from tests.dist.lora_server.cluster import Cluster, until
from tests.grids import diagonal, with_quick
from tests.oracle import reference_experts, reference_logits

from .publishing import check_greedy, published_at, runs_of
from .test_activated import INVOCATION, made  # noqa: F401  (the fixture)
from .test_pauses import DEMO, REVERSE, UPPER, Stream, call, is_still, llm, pause  # noqa: F401

MODEL, ROT13 = DEMO / "model", str(DEMO / "adapters" / "rot13")
FOLDERS = {1: UPPER, 2: REVERSE, 3: ROT13}
PROMPT = (1, *range(40, 77))
NUM = 24
CONFIG = EngineConfig(
    model_dir=str(MODEL),
    adapters=(("policy", UPPER), ("second", REVERSE)),
    dtype="float32",
    eager=True,
    num_threads=1,
    max_num_seqs=4,
)


@contextmanager
def engine(**settings: Any) -> Iterator[EngineCore]:
    core = build_engine(replace(CONFIG, **settings))
    try:
        yield core
    finally:
        core.close()


def ask(
    name: str = "r", on_publish: str = "switch", adapter: str = "policy", **fields: Any
) -> GenerateRequest:
    outer = {one: fields.pop(one) for one in ("generated", "priority", "prompt_token_ids") if one in fields}
    given = {"temperature": 0.0, "max_tokens": NUM, "ignore_eos": True, "on_publish": on_publish, **fields}
    request = {"prompt_token_ids": PROMPT, "request_id": name, "adapter": adapter, **outer}
    return GenerateRequest(sampling=SamplingParams(**given), **request)


def drive(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[TokenOutput]]:
    """The outputs of each request."""
    found: defaultdict[str, list[TokenOutput]] = defaultdict(list)
    for one in requests:
        core.add_request(one)
    for _ in range(30_000):
        if not core.has_work:
            return found
        outputs = core.step()
        if not outputs:
            time.sleep(1e-3)  # adapters and masks are on their way
        for output in outputs:
            found[output.request_id].append(output)
    raise AssertionError("no end")


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


WAYS = {
    "plain": {},
    "ahead": {"async_scheduling": "on"},
    "in_chunks": {"max_num_batched_tokens": 9},
    "one_at_a_time": {"max_num_seqs": 1},
    "one_resident": {"max_loras": 1},
    "two_ranks_by_experts": {"expert_parallel": 2},
    "two_ranks_by_tensors": {"tensor_parallel": 2},
    "merged": {"batching": "dlora"},
    "host_arena": {"max_loras": 2, "host_arena_mb": 2},
    "host_workers": {"host_workers": 1, "max_loras": 2},
}


@pytest.mark.parametrize("way", with_quick(WAYS, ("ahead", "two_ranks_by_experts", "merged", "host_workers")))
def test_tokens_are_greedy_by_the_version_that_they_name(way):
    """Beside a request that keeps its version, with two publications during the answers."""
    check_two_publications(way, **WAYS[way])


@pytest.mark.parametrize("number", [1, 2])
def test_beside_a_lora_server_tokens_are_greedy_by_their_version(number):
    """number: of ranks with tensor parallelism."""
    cluster = Cluster(shape_of(read_config(MODEL)))
    cluster.ranks = number, number
    settings = {"expert_parallel": number, "tensor_parallel": number}
    with cluster:
        check_two_publications("lora_server", lora_server=cluster.config, **settings)


def test_a_lora_server_keeps_files_of_the_last_two_versions_of_a_name():
    """And of a version with requests."""
    with Cluster(shape_of(read_config(MODEL))) as cluster, engine(lora_server=cluster.config) as core:
        store = HostStore(cluster.config.store_dir)

        def publish(folder: str) -> str:
            packed = core.read_adapter("policy", folder)
            core.add_adapter(packed, folder, replace=True)
            return packed.content_hash

        first = core.adapters.current("policy").packed.content_hash
        core.add_request(ask(on_publish="keep"))
        while not core.step():
            time.sleep(1e-3)
        last = {publish(str(REVERSE)), publish(ROT13)}
        publish(ROT13)
        assert all(one in store for one in (first, *last))
        drive(core)
        until(lambda: first not in store)
        assert all(one in store for one in last)
        core.adapters.remove("second")
        core.adapters.remove("policy")
        until(lambda: not any(one in store for one in last))


def check_two_publications(way: str, **settings: Any) -> None:
    with engine(**settings) as core:
        places = {7: REVERSE, 15: ROT13} if way != "one_at_a_time" else {7: REVERSE}
        with published_at(core, "policy", places):
            found = drive(core, ask("a"), ask("kept", "keep"), ask("b", prompt_token_ids=PROMPT[:9]))
        assert not any(one.retired for one in core.adapters.versions.values())
    for name, prompt in (("a", PROMPT), ("b", PROMPT[:9])):
        runs = runs_of(found[name])
        if way != "one_at_a_time":
            assert [version for version, _ in runs] == [1, 2, 3]
        check_greedy(MODEL, FOLDERS, prompt, runs)
        assert sum(len(tokens) for _, tokens in runs) == NUM
    kept = runs_of(found["kept"])
    assert len(kept) == 1
    check_greedy(MODEL, FOLDERS, PROMPT, kept)


def test_a_version_reads_no_kv_of_another():
    """Each version has the prompt in the cache, and the next one none of its pages."""
    with engine() as core:
        before = drive(core, ask("warm"), ask("warm too", adapter="second"))
        [first, *_] = drive(core, ask("again", max_tokens=1))["again"]
        assert first.num_cached_tokens > 0
        with published_at(core, "policy", {7: REVERSE}):
            outputs = drive(core, ask())["r"]
        check_greedy(MODEL, FOLDERS, PROMPT, runs_of(outputs))
        assert outputs[-1].timing.num_preemptions == 1
        again = drive(core, ask("again"))["again"]
        assert again[0].num_cached_tokens > 0, "by the KV of the second version"
        assert tokens_of(again) == tokens_of(before["warm too"])


QUICK = (("seed", "on"), ("penalties", "off"), ("grammar", "off"))
SAMPLINGS = {
    "logprobs": {"logprobs": 2, "processed_logprobs": True},
    "seed": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 0},
    "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bad_words": {"bad_word_ids": ((40,), (50, 51)), "min_tokens": NUM},
    "grammar": {"grammar": json_grammar({"type": "array", "items": {"type": "integer"}})},
}


@pytest.mark.parametrize(
    ("sampling", "ahead"),
    [
        pytest.param(*one.values, marks=() if one.values in QUICK else pytest.mark.slow)
        for one in diagonal(list(SAMPLINGS), ["off", "on"])
    ],
)
def test_the_rest_is_the_new_version_s_with_the_answer_so_far(sampling, ahead):
    """As a request that another instance continues with the answer so far."""
    with engine(async_scheduling=ahead) as core:
        with published_at(core, "policy", {7: REVERSE}):
            outputs = drive(core, ask(**SAMPLINGS[sampling]))["r"]
        (one, first), (two, rest) = runs_of(outputs)
        assert (one, two) == (1, 2)
        alone = drive(core, ask("alone", adapter="second", generated=first, **SAMPLINGS[sampling]))["alone"]
    assert list(rest) == tokens_of(alone)
    entries = [entry for output in outputs for entry in output.logprobs or ()][len(first) :]
    expected = [entry for output in alone for entry in output.logprobs or ()]
    assert [one.logprob for one in entries] == pytest.approx([one.logprob for one in expected], abs=1e-4)


def test_log_probabilities_of_the_prompt_are_the_first_token_s_version_s():
    with engine(max_num_batched_tokens=9) as core, published_at(core, "policy", {0: REVERSE}):
        core.add_request(ask(prompt_logprobs=0, max_tokens=3))
        core.step()  # a part of the prompt, by the first version
        outputs = drive(core)
        while core.has_work:
            outputs.setdefault("r", []).extend(core.step())
    [(version, _)] = runs_of(outputs["r"])
    report = outputs["r"][0].prompt
    assert version == 2
    scores = torch.log_softmax(reference_logits(MODEL, REVERSE, PROMPT)[:-1], dim=-1)
    expected = scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    assert [one.logprob for one in report.logprobs] == pytest.approx(expected, abs=1e-3)


def test_experts_are_of_the_version_that_computed_a_token_first():
    with engine() as core, published_at(core, "policy", {7: REVERSE}):
        outputs = drive(core, ask(routed_experts=True))["r"]
    (_, first), (_, rest) = runs_of(outputs)
    shape = outputs[0].prompt.experts[:2]
    rows = b"".join(output.prompt.experts[2] for output in outputs if output.prompt is not None)
    found = torch.frombuffer(bytearray(rows), dtype=torch.int16).view(-1, *shape)
    whole, num_first = [*PROMPT, *first, *rest][:-1], len(PROMPT) + len(first) - 1
    expected = [
        reference_experts(MODEL, UPPER, whole[:num_first]),
        reference_experts(MODEL, REVERSE, whole)[num_first:],
    ]
    assert torch.equal(found.long(), torch.cat(expected).long())


@pytest.mark.parametrize("priority", [0, BACKGROUND])
def test_a_request_that_waits_starts_with_the_new_version(priority):
    with engine(max_num_seqs=1) as core:
        core.add_request(ask("first", "keep"))
        core.step()
        core.add_request(ask("second", priority=priority))
        core.add_adapter(core.read_adapter("policy", REVERSE), REVERSE, replace=True)
        found = drive(core)
    assert [version for version, _ in runs_of(found["second"])] == [2]
    check_greedy(MODEL, FOLDERS, PROMPT, runs_of(found["second"]))


@pytest.mark.parametrize("kinds", [("activated", "plain"), ("plain", "activated")])
def test_an_activated_adapter_switches_with_its_start(made, kinds):  # noqa: F811
    base, adapters = made("mixtral")
    folders = {number: adapters[kind] for number, kind in enumerate(kinds, 1)}
    prompt = (*PROMPT[:20], *INVOCATION, 4, 9)
    with (
        engine(model_dir=str(base), adapters=(("policy", str(folders[1])),)) as core,
        published_at(core, "policy", {5: folders[2]}),
    ):
        outputs = drive(core, ask(prompt_token_ids=prompt, max_tokens=12))["r"]
    runs = runs_of(outputs)
    assert [version for version, _ in runs] == [1, 2]
    check_greedy(base, folders, prompt, runs)


def test_an_answer_of_a_version_that_can_not_load_ends_with_its_error(monkeypatch):
    bring = RankCopier._bring

    def fail(self, order, packed):
        if packed.content_hash == broken:
            raise ValueError("no such layer")
        yield from bring(self, order, packed)

    monkeypatch.setattr(RankCopier, "_bring", fail)
    with engine(adapters=(("policy", UPPER),)) as core:
        broken = core.read_adapter("policy", REVERSE).content_hash
        with published_at(core, "policy", {7: REVERSE}):
            found = drive(core, ask(), ask("kept", "keep"))
        last = found["r"][-1]
        assert (last.finish_reason, last.adapter_version) == ("error", 2)
        assert "no such layer" in (last.error or "")
        check_greedy(MODEL, FOLDERS, PROMPT, runs_of(found["r"]))
        check_greedy(MODEL, FOLDERS, PROMPT, runs_of(found["kept"]))
        assert found["kept"][-1].finish_reason == "length"


def test_a_held_answer_goes_on_with_the_version_of_the_pause(llm):  # noqa: F811
    running = Stream(llm, "running", "policy", gated=True, on_publish="switch")
    pause(llm, "keep", running)
    for path in (ROT13, REVERSE):
        llm.publish_adapter("policy", path)
        assert is_still(llm, running)
    call(llm, "resume_requests", None)
    assert running.rest() == "length"
    (one, first), (two, rest) = runs_of(running.outputs)
    assert (one, two) == (1, 3)
    alone = Stream(llm, "alone", "other", generated=first)
    alone.rest()
    assert list(rest) == alone.tokens


def test_the_library_counts_tokens_by_version():
    settings: dict[str, Any] = {"eager": True, "num_threads": 1, "dtype": "float32"}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM, ignore_eos=True, on_publish="switch")
    with (
        LLM(str(MODEL), adapters={"policy": UPPER}, **settings) as engine,
        published_at(engine.client.core, "policy", {7: REVERSE}),
    ):
        [found] = engine.generate([list(PROMPT)], "policy", sampling)
        [base] = engine.generate([list(PROMPT)], None, sampling)
    assert base.adapter_versions == ()
    (one, num_first), (two, num_rest) = found.adapter_versions
    assert (one, two, num_first + num_rest) == (1, 2, NUM)
    runs = [(1, found.token_ids[:num_first]), (2, found.token_ids[num_first:])]
    check_greedy(MODEL, FOLDERS, PROMPT, runs)


def test_another_word_is_refused():
    with pytest.raises(
        ValueError, match="on_publish='later' is not allowed; on_publish must be keep or switch"
    ):
        SamplingParams(on_publish="later")  # type: ignore[arg-type]
