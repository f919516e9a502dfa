# SPDX-License-Identifier: Apache-2.0
"""The library on the demo model: answers anyone can check."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BatchEncoding

from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text
from moe_lora import LLM, AsyncLLM, GenerationError, SamplingParams
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, EngineDeadError
from moe_lora.core.request import TokenLogprobs
from moe_lora.engine.adapters.copies import RankCopier
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[2] / "demo"
ADAPTERS = json.loads((DEMO / "adapters" / "index.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SETTINGS = {"eager": True, "num_threads": 1, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    paths = {name: str(DEMO / "adapters" / name) for name in ADAPTERS}
    with LLM(str(DEMO / "model"), adapters=paths, **SETTINGS) as engine:
        yield engine


def questions(names: list[str], seed: int = 0) -> tuple[list[str], list[str]]:
    rng = random.Random(seed)
    texts = [sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS)) for _ in names]
    answers = [TASKS[ADAPTERS[name]["task"]](text) for name, text in zip(names, texts, strict=True)]
    return [prompt_for(text) for text in texts], answers


def test_every_adapter_does_its_task_in_one_mixed_batch(llm):
    names = list(ADAPTERS) * 4
    random.Random(1).shuffle(names)
    prompts, answers = questions(names)
    found = [completion.text for completion in llm.generate(prompts, names, GREEDY)]
    exact = sum(a == b for a, b in zip(found, answers, strict=True)) / len(names)
    assert exact >= 0.95


def test_base_model_answers_beside_adapters(llm):
    completions = llm.generate([prompt_for("abcd")] * 2, [None, "upper"], GREEDY)
    assert [completion.text for completion in completions] == ["abcd", "ABCD"]
    assert completions[0].finish_reason == "stop"


def test_prompts_without_sampling_get_the_checkpoint_s_defaults(tmp_path):
    folder = shutil.copytree(DEMO / "model", tmp_path / "model")
    fields = {"eos_token_id": 2, "temperature": 5.0, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    with LLM(str(folder), **SETTINGS) as engine:
        assert engine.default_sampling() == SamplingParams(temperature=5.0, top_k=1)
        silent = engine.generate("hello")[0]
        greedy = engine.generate("hello", sampling=SamplingParams(temperature=0.0))[0]
        own = [engine.generate("hello", sampling=SamplingParams(temperature=50.0, seed=s))[0] for s in (1, 2)]
    assert silent.token_ids == greedy.token_ids
    assert {one.token_ids for one in own} != {greedy.token_ids}


def test_stop_string_ends_the_text_before_it(llm):
    sampling = SamplingParams(temperature=0.0, stop=("CD",))
    [completion] = llm.generate(prompt_for("abcdef"), "upper", sampling)
    assert (completion.text, completion.finish_reason) == ("AB", "stop")


def test_token_ids_are_a_prompt_too(llm):
    ids = llm.tokenizer.encode(prompt_for("abc"))
    [completion] = llm.generate(ids, "upper", GREEDY)
    assert completion.text == "ABC"
    assert completion.prompt_token_ids == tuple(ids)


IDS = [1, 40, 41, 42]
PROMPTS = {
    "tensor": (torch.tensor(IDS), 1),
    "rows of a tensor": (torch.tensor([IDS, IDS]), 2),
    "list of tensors": ([torch.tensor(IDS)] * 2, 2),
    "array": (np.array(IDS), 1),
    "rows of an array": (list(np.array([IDS, IDS])), 2),
    "numbers of numpy": (list(np.array(IDS)), 1),
    "scalar tensors": (list(torch.tensor(IDS)), 1),
    "lists of scalar tensors": ([list(torch.tensor(IDS))], 1),
    "lists of numbers of numpy": ([list(np.array(IDS))] * 2, 2),
}


@pytest.mark.parametrize("given", PROMPTS)
def test_token_ids_of_tensors_and_arrays_are_prompts(llm, given):
    prompts, num_prompts = PROMPTS[given]
    found = llm.generate(prompts, "upper", GREEDY)
    [want] = llm.generate([IDS], "upper", GREEDY)
    assert [(one.prompt_token_ids, one.token_ids) for one in found] == [
        (tuple(IDS), want.token_ids)
    ] * num_prompts
    assert {type(token_id) for one in found for token_id in one.prompt_token_ids} == {int}


OTHERS = (
    *([1.0, 2.0], [None], [[None]], torch.tensor([0.5, 1.5]), torch.tensor(5), None, b"ab", 5, [b"ab"]),
    *([True, False], {"prompt": "ab"}, [{"prompt_token_ids": [1]}], BatchEncoding({"input_ids": [[1]]})),
)


@pytest.mark.parametrize("prompt", OTHERS, ids=repr)
def test_a_prompt_of_other_things_is_refused_and_the_engine_goes_on(llm, prompt):
    with pytest.raises(ValueError, match="a prompt must be text or token ids, not"):
        llm.generate(prompt, None, GREEDY)
    assert llm.generate(prompt_for("abcd"), "upper", GREEDY)[0].text == "ABCD"


@pytest.mark.parametrize("token_id", [-1, 500, 2**70])
def test_a_prompt_s_unknown_id_is_refused_by_its_number(llm, token_id):
    with pytest.raises(ValueError, match=f"prompt has token id {token_id}, outside the vocabulary of"):
        llm.generate([token_id], None, GREEDY)
    assert llm.generate(prompt_for("abcd"), "upper", GREEDY)[0].text == "ABCD"


def test_an_impossible_prompt_starts_no_request_of_its_call(llm, monkeypatch):
    monkeypatch.setattr(llm.client, "submit", lambda *_: pytest.fail("a request started"))
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate([IDS, []], None, GREEDY)


def test_parameters_are_prepared_once_for_all_prompts_of_a_call(llm, monkeypatch):
    prepared = []
    monkeypatch.setattr(llm, "_prepared", lambda one: prepared.append(one) or one)
    other = replace(GREEDY, max_tokens=2)
    llm.generate([IDS] * 4, None, [GREEDY, other, GREEDY, other])
    assert prepared == [GREEDY, other]


def test_a_forked_process_has_no_engine_and_says_so(llm):
    calls = (lambda: llm.generate([IDS], None, GREEDY), llm.stats)

    def child() -> None:
        for call in calls:
            with pytest.raises(EngineDeadError, match="a forked process has no engine"):
                call()
        llm.close()

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    try:
        forked.join(PATIENCE_S)
        assert forked.exitcode == 0
    finally:
        forked.kill()
        forked.join()
    assert calls[0]()[0].token_ids
    calls[1]()


def test_no_prompts_have_no_embeddings(llm):
    [row] = llm.embed("hello")
    assert llm.embed([]).shape == (0, len(row))
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("adapter", "sampling", "problem"),
    [
        ("upper", {"max_tokens": 3}, r"^sampling=\{'max_tokens': 3\} must be SamplingParams"),
        ("upper", {}, r"^sampling=\{\} must be SamplingParams"),
        ("upper", [{"max_tokens": 3}], r"^sampling=\{'max_tokens': 3\} must be SamplingParams"),
        ("upper", 3, "^sampling=3 must be SamplingParams"),
        ("upper", [], "^sampling has 0 entries for 1 prompts"),
        (5, None, "^adapter=5 must be a name"),
        ([5], None, "^adapter=5 must be a name"),
    ],
)
def test_an_argument_of_another_type_is_named(llm, adapter, sampling, problem):
    with pytest.raises(ValueError, match=problem):
        llm.generate("hello", adapter, sampling)
    assert llm.generate(["hello"] * 2, "upper", [None, GREEDY])[1].text


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, {}])
def test_another_type_is_named_in_asyncio_too(sampling):
    engine = AsyncLLM(str(DEMO / "model"), **SETTINGS)
    try:
        with pytest.raises(ValueError, match=r"^sampling=.* must be SamplingParams"):
            asyncio.run(engine.generate("hello", None, sampling))
    finally:
        engine.close()


@pytest.mark.parametrize("adapters", [["demo/adapters/upper"], "upper"])
def test_adapters_without_names_are_refused(adapters):
    with pytest.raises(ValueError, match=r"^adapters=.* must be a mapping of names to directories"):
        LLM(str(DEMO / "model"), adapters=adapters)


def test_a_tensor_is_a_prompt_in_asyncio_too():
    async def answers(llm: AsyncLLM) -> None:
        want = await llm.generate(IDS, None, GREEDY)
        assert (await llm.generate(torch.tensor(IDS), None, GREEDY)).token_ids == want.token_ids

    engine = AsyncLLM(str(DEMO / "model"), **SETTINGS)
    try:
        asyncio.run(answers(engine))
    finally:
        engine.close()


def test_log_probabilities_of_a_prompt_are_made_outside_the_event_loop(monkeypatch):
    threads, made = set(), TokenLogprobs.__init__

    def noted(report: TokenLogprobs, *args: Any, **fields: Any) -> None:
        threads.add(threading.current_thread())
        made(report, *args, **fields)

    monkeypatch.setattr(TokenLogprobs, "__init__", noted)
    engine = AsyncLLM(str(DEMO / "model"), **SETTINGS)
    try:
        found = asyncio.run(engine.generate(IDS, None, replace(GREEDY, prompt_logprobs=1)))
    finally:
        engine.close()
    assert len(found.prompt_logprobs) == len(IDS)
    assert threads
    assert threading.current_thread() not in threads


def test_lists_and_strings_in_sampling_stop_and_forbid_as_tuples_do(llm):
    prompt, greedy = prompt_for("abcdef"), {"temperature": 0.0, "max_tokens": 20}
    [d] = llm.tokenizer.encode("D", add_special_tokens=False)

    def answer(**fields: object) -> tuple[str | None, str]:
        [found] = llm.generate(prompt, "upper", SamplingParams(**greedy, **fields))
        return found.text, found.finish_reason

    assert answer(stop="DEX") == answer() == ("ABCDEF", "stop")
    assert answer(stop=["CD"]) == ("AB", "stop")
    assert answer(stop_token_ids=[d], min_tokens=2) == ("ABC", "stop")
    assert answer(bad_words="DE") == answer(bad_words=("DE",))
    assert answer(bad_word_ids=[[d]]) == answer(bad_word_ids=((d,),)) != answer()
    assert answer() == ("ABCDEF", "stop")


def test_the_tokenizer_s_end_token_ends_an_answer_of_the_library_too(tmp_path):
    folder = shutil.copytree(DEMO / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "generation_config.json").unlink()
    prompt, limit = prompt_for("abcd"), {"temperature": 0.0, "max_tokens": 12}
    with LLM(str(folder), **SETTINGS) as engine:
        [end] = engine.tokenizer.eos_token_ids
        [ended] = engine.generate(prompt, None, SamplingParams(**limit))
        [ignored] = engine.generate(prompt, None, SamplingParams(**limit, ignore_eos=True))
    assert (ended.text, ended.finish_reason, ended.token_ids[-1]) == ("abcd", "stop", end)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 12)


@pytest.mark.parametrize("name", ["", "a,b", "line\n", 7, b"x"])
def test_an_adapter_s_name_that_requests_can_not_use_is_refused(llm, name):
    path = str(DEMO / "adapters" / "upper")
    version = next(one.version for one in llm.list_adapters() if one.name == "upper")
    with pytest.raises(AdapterError, match=r"the name .* (is empty|must be at most|is not a text)"):
        llm.publish_adapter(name, path)
    with pytest.raises(AdapterError, match=r"the name .* (is empty|must be at most|is not a text)"):
        LLM(str(DEMO / "model"), adapters={name: path}, **SETTINGS)
    assert next(one.version for one in llm.list_adapters() if one.name == "upper") == version


def test_logprobs_come_one_per_token(llm):
    sampling = SamplingParams(temperature=0.0, logprobs=3)
    [completion] = llm.generate(prompt_for("abc"), "upper", sampling)
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(report.position == 1 and len(report.top) == 3 for report in completion.logprobs)


def test_one_bad_prompt_refuses_the_call_and_the_engine_goes_on(llm):
    with pytest.raises(AdapterNotFoundError, match="'nobody' is not loaded"):
        llm.generate([prompt_for("abc")] * 3, ["upper", "nobody", "upper"], GREEDY)
    with pytest.raises(ValueError, match="adapter has 1 entries for 2 prompts"):
        llm.generate(["a=", "b="], ["upper"], GREEDY)
    assert llm.generate(prompt_for("abc"), "upper", GREEDY)[0].text == "ABC"


def test_published_version_serves_later_requests_and_no_stale_kv(llm):
    prompt = prompt_for("abcdefgh")
    upper, rot13 = (str(DEMO / "adapters" / name) for name in ("upper", "rot13"))
    assert llm.publish_adapter("changing", upper).version == 1
    assert llm.generate(prompt, "changing", GREEDY)[0].text == "ABCDEFGH"
    weights = load_file(Path(rot13) / "adapter_model.safetensors")
    config = json.loads((Path(rot13) / "adapter_config.json").read_text())
    assert llm.publish_adapter("changing", weights, config).version == 2
    assert llm.generate(prompt, "changing", GREEDY)[0].text == "nopqrstu"
    llm.unload_adapter("changing")
    assert "changing" not in {adapter.name for adapter in llm.list_adapters()}


@pytest.mark.filterwarnings("ignore")
def test_objects_of_a_training_loop_are_published_as_they_are(llm):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    model = PeftModel.from_pretrained(base, str(DEMO / "adapters" / "rot13"))
    with pytest.raises(ValueError, match="config is missing; give PEFT's LoraConfig"):
        llm.publish_adapter("trained", model.state_dict())
    with pytest.raises(ValueError, match=r"source is a PeftModel.*a state dict"):
        llm.publish_adapter("trained", model)
    llm.publish_adapter("trained", model.state_dict(), model.peft_config["default"])
    assert llm.generate(prompt_for("abcdefgh"), "trained", GREEDY)[0].text == "nopqrstu"
    llm.unload_adapter("trained")


def test_folder_below_that_has_the_adapters_name_is_published(llm):
    llm.publish_adapter("upper", DEMO / "adapters")
    assert {adapter.name: adapter.path for adapter in llm.list_adapters()}["upper"] == str(
        DEMO / "adapters" / "upper"
    )


def test_request_under_way_finishes_on_its_version(llm):
    upper, rot13 = (str(DEMO / "adapters" / name) for name in ("upper", "rot13"))
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    llm.publish_adapter("swapped", upper)
    expected = llm.generate(prompt_for("abcdefgh"), "upper", long)[0].token_ids
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(
        target=lambda: found.append(llm.generate(prompt_for("abcdefgh"), "swapped", long)[0].token_ids)
    )
    thread.start()
    while not llm.stats().num_running:
        pass
    llm.publish_adapter("swapped", rot13)
    thread.join()
    assert found == [expected]
    llm.unload_adapter("swapped")


def test_adapter_that_cannot_be_served_is_refused(llm, tmp_path):
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        llm.publish_adapter("broken", str(tmp_path))
    with pytest.raises(ValueError, match="config is missing"):
        llm.publish_adapter("broken", {})
    with pytest.raises(AdapterError, match="starts with 'composed:', as names of weighted sums do"):
        llm.publish_adapter("composed:x", DEMO / "adapters" / "upper")


def test_async_engine_streams_many_requests_at_once():
    paths = {name: str(DEMO / "adapters" / name) for name in ("upper", "rot13")}
    engine = AsyncLLM(str(DEMO / "model"), adapters=paths, **SETTINGS)

    async def stream(adapter: str | None) -> str:
        return "".join([text async for text in engine.stream(prompt_for("abcd"), adapter, GREEDY)])

    async def run() -> list[str]:
        return await asyncio.gather(*(stream(name) for name in (None, "upper", "rot13", None)))

    assert asyncio.run(run()) == ["abcd", "ABCD", "nopq", "abcd"]
    engine.close()


def test_a_request_that_the_engine_can_not_complete_raises_in_asyncio_too(monkeypatch):
    paths = {"upper": str(DEMO / "adapters" / "upper")}
    engine = AsyncLLM(str(DEMO / "model"), adapters=paths, **SETTINGS)

    def fail(*_):
        raise OSError("the disk is gone")
        yield

    async def stream(adapter: str | None) -> str:
        return "".join([text async for text in engine.stream(prompt_for("abcd"), adapter, GREEDY)])

    async def run() -> list[str | BaseException]:
        whole = engine.generate(prompt_for("abcd"), "upper", GREEDY)
        return await asyncio.gather(whole, stream("upper"), stream(None), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(RankCopier, "_bring", fail)
        *failed, base = asyncio.run(run())
    assert base == "abcd"
    for error in failed:
        assert isinstance(error, GenerationError)
        assert "the disk is gone" in error.problems[0]
        assert [one.finish_reason for one in error.completions] == ["error"]
    engine.close()


def test_min_tokens_keeps_an_answer_going(llm):
    sampling = SamplingParams(temperature=0.0, min_tokens=8, max_tokens=12)
    [completion] = llm.generate(prompt_for("abc"), "upper", sampling)
    assert len(completion.token_ids) >= 8
    assert not set(llm.info.eos_token_ids) & set(completion.token_ids[:7])


def test_sampling_mixes_with_greedy_requests(llm):
    sampled = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=3, max_tokens=20)
    cold = SamplingParams(temperature=1e-30, max_tokens=20)
    prompts = [prompt_for("abcdef")] * 4
    first = llm.generate(prompts, "upper", [sampled, GREEDY, sampled, cold])
    alone = llm.generate(prompts[0], "upper", sampled)
    assert first[0].token_ids == first[2].token_ids == alone[0].token_ids
    assert first[1].text == first[3].text == "ABCDEF"


def test_stop_token_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(ValueError, match="stop_token_ids has token id 999"):
        llm.generate(prompt_for("abc"), "upper", SamplingParams(stop_token_ids=(999,)))


def test_stop_token_ends_the_answer_and_stays_out_of_its_text(llm):
    [c] = llm.tokenizer.encode("C", add_special_tokens=False)
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(c,))
    [completion] = llm.generate(prompt_for("abcd"), "upper", sampling)
    assert (completion.text, completion.finish_reason) == ("AB", "stop")
    assert completion.token_ids[-1] == c


def test_an_adapter_above_the_rank_limit_is_refused_from_a_folder_and_from_memory():
    folder = DEMO / "adapters" / "upper"
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    rank = config["r"]
    with pytest.raises(AdapterError, match=f"rank {rank} is above max_lora_rank={rank - 1}"):
        LLM(str(DEMO / "model"), adapters={"upper": str(folder)}, max_lora_rank=rank - 1, **SETTINGS)
    with LLM(str(DEMO / "model"), max_lora_rank=rank - 1, **SETTINGS) as engine:
        with pytest.raises(AdapterError, match=f"rank {rank} is above max_lora_rank={rank - 1}"):
            engine.publish_adapter("upper", tensors, config)
        assert engine.list_adapters() == []
