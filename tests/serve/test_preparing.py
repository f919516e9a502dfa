# SPDX-License-Identifier: Apache-2.0
"""What a body asks for, checked within the limits: small ones here, large ones in a process of their own."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import runpy
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from moe_lora.config import LimitsConfig
from moe_lora.core.request import ModelInfo
from moe_lora.dist.cluster.instances import ServedVersion
from moe_lora.engine.text.adapter_text import with_adapter_text
from moe_lora.engine.text.text import load_tokenizer
from moe_lora.serve.access import ANYONE, Caller
from moe_lora.serve.admin.controls import MemoryBody, WakeUpQuery
from moe_lora.serve.anthropic.request import MessagesBody
from moe_lora.serve.api_keys import ApiKey
from moe_lora.serve.frontend import AdapterTexts
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.limits import Limits, client_at
from moe_lora.serve.openai import checking_process, preparing
from moe_lora.serve.openai.checking_process import CheckingProcess
from moe_lora.serve.openai.cohere import CohereRequest
from moe_lora.serve.openai.native import AbortBody
from moe_lora.serve.openai.preparing import Preparer
from moe_lora.serve.openai.prompt_bodies import TokenizeRequest
from moe_lora.serve.openai.protocol import ChatRequest, CompletionRequest
from moe_lora.serve.openai.responses.request import ResponsesBody
from tests.patience import PATIENCE_S
from tests.small_tokenizers import characters, write_dir
from tests.stopped_processes import stop

from .conftest import scripted
from .live_server import wait_until
from .test_limits import limited_server, refused

INFO = ModelInfo(
    name="base",
    model_dir="base",
    family="mixtral",
    dtype="float32",
    max_model_len=100_000,
    vocab_size=37,
    max_loras=4,
    eos_token_ids=(2,),
)
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SCOPE = {"client": ("127.0.0.1", 5), "state": {"caller": ANYONE}}


PATIENT = LimitsConfig(check_timeout_s=PATIENCE_S)
"""A busy machine takes longer than the default to start the process that checks large bodies."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(checking_process, "START_S", PATIENCE_S)


def prepare(bodies, tokenizer, adapter_texts=None, caller=ANYONE, **limits):
    """What each of (kind, body) asks for, or the error."""

    async def run():
        preparer, found = (
            Preparer(tokenizer, Limits(replace(PATIENT, **limits)), adapter_texts=adapter_texts),
            [],
        )
        scope = {**SCOPE, "state": {"caller": caller}}
        for kind, body in bodies:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                found.append(await preparer.prepare(kind, bytearray(content), INFO, scope))
            except ApiError as error:
                found.append(error.body)
        return found

    return asyncio.run(run())


def test_a_large_body_is_checked_in_another_process_and_asks_for_the_same(tokenizer, monkeypatch):
    bodies = [
        (CompletionRequest, {"prompt": "hello world", "n": 2, "stop": ["x"]}),
        (CompletionRequest, {"prompt": [[5, 6], [7]], "max_tokens": 3, "stream": True, "model": "shout"}),
        (ChatRequest, {**CHAT, "top_k": 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": 5}]}),
        (CompletionRequest, {"prompt": [5, 10**400]}),
        (CompletionRequest, {"prompt": "a", "temperature": -1}),
        (CompletionRequest, b"{"),
        (CompletionRequest, b'{"prompt": "\xff"}'),
    ]
    here = prepare(bodies, tokenizer)
    calls, run_sync = [], preparing.to_process.run_sync

    async def counted(*args, **keywords):
        calls.append(args)
        return await run_sync(*args, **keywords)

    monkeypatch.setattr(preparing.to_process, "run_sync", counted)
    monkeypatch.setattr(preparing, "INLINE_BYTES", 0)
    assert prepare(bodies, tokenizer) == here
    assert [args[0] for args in calls].count(preparing.prepare_now) == len(bodies)
    assert [one["error"]["code"] for one in here[3:]] == [400] * 5
    assert here[2].sampling.top_k == 0
    assert here[0].body.prompt == ""


@pytest.fixture
def started(monkeypatch):
    """The processes that checked large bodies, all bodies being large."""
    found, open_process = [], preparing.to_process.open_process

    async def noted(*args, **words):
        found.append(await open_process(*args, **words))
        return found[-1]

    monkeypatch.setattr(preparing.to_process, "open_process", noted)
    monkeypatch.setattr(preparing, "INLINE_BYTES", 0)
    return found


def test_checks_that_end_while_their_process_starts_are_503_and_leave_one_process(
    tokenizer, started, monkeypatch
):
    body, open_process = bytearray(b'{"prompt": "hello"}'), preparing.to_process.open_process

    async def run():
        may_start = asyncio.Event()

        async def held(*args, **words):
            process = await open_process(*args, **words)
            await may_start.wait()
            return process

        monkeypatch.setattr(preparing.to_process, "open_process", held)
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        limits = Limits(LimitsConfig(check_timeout_s=0.001))
        preparer = Preparer(tokenizer, limits)
        for _ in range(4):
            with pytest.raises(ApiError) as refused:
                await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
            assert refused.value.status == 503
        may_start.set()
        limits.change(PATIENT)
        found = await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
        assert os.getpriority(os.PRIO_PROCESS, started[0].pid) == max(usual, checking_process.CHECK_NICE)
        return found.prompts, [one.returncode for one in started]

    prompts, codes = asyncio.run(run())
    assert prompts == [tuple(tokenizer.encode("hello"))]
    assert codes == [None]


def test_ctrl_c_in_the_terminal_does_not_reach_a_check(tokenizer, started):
    """The server then finishes its requests, and ends the process itself."""

    async def run():
        process = CheckingProcess(tokenizer)
        preparer, found = Preparer(tokenizer, Limits(PATIENT), process), []
        await process.ready()
        for _ in range(2):
            os.kill(started[0].pid, signal.SIGINT)
            body = bytearray(b'{"prompt": "hello"}')
            found.append(await preparer.prepare(CompletionRequest, body, INFO, SCOPE))
        return [one.prompts for one in found], [one.returncode for one in started]

    prompts, codes = asyncio.run(run())
    assert prompts == [[tuple(tokenizer.encode("hello"))]] * 2
    assert codes == [None]


@pytest.mark.parametrize("sent", ["at once", "later"])
def test_the_process_starts_with_the_server_and_the_first_body_finds_it(tokenizer, started, sent):
    async def run():
        process = CheckingProcess(tokenizer)
        preparer = Preparer(tokenizer, Limits(PATIENT), process)
        async with process.started():
            while sent == "later" and not process._starting.done():
                await asyncio.sleep(0.01)
            body = bytearray(b'{"prompt": "hello"}')
            found = await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
            return found.prompts, [one.returncode for one in started]

    prompts, codes = asyncio.run(run())
    assert prompts == [tuple(tokenizer.encode("hello"))]
    assert codes == [None]


def test_a_server_starts_the_process_before_a_large_body_comes(demo):
    def has_process() -> bool:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status, command = (folder / "status").read_text(), (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"PPid:\t{demo.process.pid}\n" in status and b"anyio" in command:
                return True
        return False

    wait_until(has_process, "a process that checks large bodies")


@pytest.mark.parametrize("wait_s", [None, 0.0, 0.003, 0.01, 0.03, 0.1, 0.3])
def test_a_server_that_ends_while_the_process_starts_ends(tokenizer, started, wait_s):
    """Each wait leads to another place of the start; a loop that hangs is ended by the test's limit."""

    async def run(is_cancelled):
        async with CheckingProcess(tokenizer).started():
            if wait_s is not None:
                await asyncio.sleep(wait_s)
            if is_cancelled:
                raise asyncio.CancelledError

    asyncio.run(run(False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run(True))


def test_a_server_ends_beside_a_process_that_never_answers(tokenizer, monkeypatch):
    """And whoever cancels the end is heard."""
    monkeypatch.setattr(checking_process, "EXIT_S", 0.2)

    async def hangs(limit_s):
        await asyncio.Event().wait()

    monkeypatch.setattr(checking_process, "_spawn", hangs)

    async def run():
        async with CheckingProcess(tokenizer).started():
            asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


@pytest.mark.parametrize("name", ["moe_lora.cli.main", "moe_lora.dist.launch.run_role"])
def test_the_process_can_read_the_files_by_which_front_ends_start(name):
    """`anyio.to_process` runs the file of the parent's main module, without a package."""
    assert runpy.run_path(importlib.import_module(name).__file__, run_name="__mp_main__")["main"]


def test_a_start_that_fails_is_tried_again_by_the_first_body(tokenizer, started, monkeypatch):
    spawn, tried = checking_process._spawn, []

    async def fails(limit_s):
        tried.append(limit_s)
        if len(tried) == 1:
            raise OSError("no memory for another process")
        await spawn(limit_s)

    async def run():
        process = CheckingProcess(tokenizer)
        preparer = Preparer(tokenizer, Limits(PATIENT), process)
        monkeypatch.setattr(checking_process, "_spawn", fails)
        async with process.started():
            while not process._starting.done():
                await asyncio.sleep(0.01)
            body = bytearray(b'{"prompt": "hello"}')
            return (await preparer.prepare(CompletionRequest, body, INFO, SCOPE)).prompts

    assert asyncio.run(run()) == [tuple(tokenizer.encode("hello"))]


def test_a_process_that_stands_still_between_two_bodies_is_ended_and_the_next_one_takes_over(
    tokenizer, started, monkeypatch
):
    body = bytearray(b'{"prompt": "hello"}')

    async def run():
        preparer = Preparer(tokenizer, Limits(PATIENT))
        await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
        stop(started[0].pid)
        monkeypatch.setattr(checking_process, "START_S", 0.05)
        with pytest.raises(ApiError) as refused:
            await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
        monkeypatch.setattr(checking_process, "START_S", PATIENCE_S)
        await preparer.prepare(CompletionRequest, body, INFO, SCOPE)
        return refused.value.status, len(started), started[0].returncode

    assert asyncio.run(run()) == (503, 2, -signal.SIGKILL)


def endless(kind, content, tokenizer, bounds):
    Path(json.loads(content)["prompt"]).touch()
    time.sleep(2 * PATIENCE_S)


def test_a_check_that_is_given_up_ends_with_its_process(tokenizer, started, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "prepare_now", endless)
    begun = tmp_path / "begun"
    body = bytearray(json.dumps({"prompt": str(begun)}).encode())

    async def run():
        preparer = Preparer(tokenizer, Limits(PATIENT))
        check = asyncio.create_task(preparer.prepare(CompletionRequest, body, INFO, SCOPE))
        while not begun.exists():
            assert not check.done()
            await asyncio.sleep(0.01)
        check.cancel()
        await asyncio.wait([check])
        return [one.returncode for one in started]

    assert asyncio.run(run()) == [-signal.SIGKILL]


def test_a_tokenizer_goes_to_another_process_by_its_folder_or_whole(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "hello world"
    assert again.encode(text) == tokenizer.encode(text)
    chat = [{"role": "user", "content": "fox"}]
    assert again.render_chat(chat) == tokenizer.render_chat(chat)
    assert again.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize("inline_bytes", [0, preparing.INLINE_BYTES])
def test_an_adapter_s_template_and_end_token_are_its_requests(tmp_path, monkeypatch, inline_bytes):
    monkeypatch.setattr(preparing, "INLINE_BYTES", inline_bytes)
    base = load_tokenizer(write_dir(tmp_path / "base", characters(), chat_template="fox"))
    write_dir(tmp_path / "own", characters(), chat_template="hello", eos_token="<pad>")
    write_dir(tmp_path / "bad", characters(), chat_template=5)
    served = {name: ServedVersion(str(tmp_path / name), 1) for name in ("own", "bad")}
    texts = AdapterTexts(served, None, bases=("base",))
    bodies = [(ChatRequest, {**CHAT, "model": name}) for name in ("base", "own", "bad")]
    bodies.append((CompletionRequest, {"prompt": "fox", "model": "base:own"}))
    of_base, of_own, of_bad, completion = prepare(bodies, base, lambda _: texts)
    assert of_base.prompts == [tuple(base.encode("fox", add_special_tokens=False))]
    assert of_own.prompts == [tuple(base.encode("hello", add_special_tokens=False))]
    assert of_base.sampling.stop_token_ids == ()
    assert of_own.sampling.stop_token_ids == completion.sampling.stop_token_ids == (0,)
    assert "the text files of adapter 'bad' can't be used" in of_bad["error"]["message"]
    key = ApiKey(id="a", digest="0" * 64, tenant="a", adapters=("ow?",))
    caller = Caller(key, is_admin=False)
    found = prepare(bodies, base, lambda key: AdapterTexts(served, None, key, ("base",)), caller)
    assert [one.prompts for one in found] == [one.prompts for one in (of_base, of_own, of_base, completion)]


def test_an_adapter_s_lost_chat_template_is_never_the_base_s_in_silence(tmp_path):
    base = load_tokenizer(write_dir(tmp_path / "base", characters(), chat_template="fox"))
    write_dir(tmp_path / "own", characters(), chat_template="hello")
    (tmp_path / "plain").mkdir()
    served = {name: ServedVersion(str(tmp_path / name), 1) for name in ("own", "plain")}
    used: dict[str, tuple[str, int]] = {"unloaded": ("x", 1)}

    def ask() -> list:
        texts = AdapterTexts(served, None, None, ("base",), used)
        return prepare([(ChatRequest, {**CHAT, "model": name}) for name in served], base, lambda _: texts)

    own, plain = ask()
    assert [*used] == ["own"]
    for name in served:
        shutil.rmtree(tmp_path / name)
    assert [one.prompts for one in ask()] == [own.prompts, plain.prompts], "files are read once"
    with_adapter_text.cache_clear()
    gone, still_plain = ask()
    assert "are gone from its folder; load the adapter again" in gone["error"]["message"]
    assert still_plain.prompts == plain.prompts
    served["own"] = ServedVersion(str(tmp_path / "own"), 2)
    assert [one.prompts for one in ask()] == [plain.prompts] * 2, "the second version came without files"


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_first_error_ends_the_check(tokenizer, kind):
    wrong = [
        {**CHAT, "prompt": "a", **{f"field_{number}": 1 for number in range(300)}},
        {"messages": [{"role": 5}] * 300} if kind is ChatRequest else {"prompt": [{}] * 300},
    ]
    for error in prepare([(kind, body) for body in wrong], tokenizer):
        assert error["error"]["code"] == 400
        assert len(error["error"]["message"]) < 200
        assert "more problems" not in error["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(
            (ChatRequest, name)
            for name in ("messages", "tools", "documents", "guided_choice", "lora", "stop")
        ),
        *((ResponsesBody, name) for name in ("include", "tools")),
        *((MessagesBody, name) for name in ("messages", "tools", "stop_sequences")),
        *((TokenizeRequest, name) for name in ("prompt", "tools")),
        *((kind, "tags") for kind in (MemoryBody, WakeUpQuery)),
        (CohereRequest, "embedding_types"),
        (AbortBody, "rid"),
    ],
)
def test_a_list_is_read_up_to_its_first_wrong_item(kind, field):
    with pytest.raises(ValidationError) as error:
        kind.model_validate({field: [1.5] * 300})
    assert sum(one["loc"][0] == field for one in error.value.errors()) <= 5


@pytest.mark.parametrize("wrong", ["x", None, True, 1e400, [1]])
def test_a_mapping_is_read_up_to_its_first_wrong_value(wrong):
    biases = {"1": 5, "2": -0.5, **{str(number): wrong for number in range(3, 300)}}
    with pytest.raises(ValidationError, match=r"logit_bias\.3") as error:
        ChatRequest.model_validate({**CHAT, "logit_bias": biases})
    assert error.value.error_count() == 1


def test_json_is_bounded_in_depth(tokenizer):
    def body(depth):
        inner = json.loads("[" * (depth - 2) + "]" * (depth - 2))
        return {**CHAT, "max_tokens": 1, "chat_template_kwargs": {"x": inner}}

    fits, deep = prepare([(ChatRequest, body(32)), (ChatRequest, body(33))], tokenizer)
    assert fits.sampling.max_tokens == 1
    assert "32 deep" in deep["error"]["message"]
    [endless] = prepare([(ChatRequest, b"[" * 15_000)], tokenizer)
    assert endless["error"]["code"] == 400


def test_choices_and_tokens_of_a_request_are_bounded_but_for_one_choice(tokenizer):
    bodies = [
        {"prompt": [[5]] * 3, "n": 2},
        {"prompt": [[5]] * 3, "n": 3},
        {"prompt": [5], "max_tokens": 90_000},
        {"prompt": [5], "max_tokens": 600, "n": 2},
        {"prompt": [5], "max_tokens": 100, "logprobs": 9},
    ]
    found = prepare(
        [(CompletionRequest, one) for one in bodies], tokenizer, max_choices=6, max_request_tokens=1000
    )
    assert found[0].answer_tokens == [16] * 3
    assert "more than 6 choices" in found[1]["error"]["message"]
    assert found[2].answer_tokens == [90_000]
    assert "1202 tokens" in found[3]["error"]["message"]
    assert "1001 tokens" in found[4]["error"]["message"]


def test_log_probabilities_of_a_prompt_fit_a_message(tokenizer, monkeypatch):
    monkeypatch.setattr(preparing, "MAX_REPORT_BYTES", 8 * 3 * 4)
    bodies = [{"prompt": [[5], [5] * num], "prompt_logprobs": 2, "max_tokens": 1} for num in (4, 5)]
    bodies.append({"prompt": [5] * 5, "echo": True, "logprobs": 2, "max_tokens": 1})
    fits, large, echoed = prepare([(CompletionRequest, one) for one in bodies], tokenizer)
    assert len(fits.prompts) == 2
    for refusal, param in ((large, "prompt_logprobs"), (echoed, "logprobs")):
        assert "have 120 bytes, more than the 96 of one message; shorten" in refusal["error"]["message"]
        assert refusal["error"]["message"].endswith("or ask for fewer log probabilities")
        assert (refusal["error"]["code"], refusal["error"]["param"]) == (400, param)


def test_an_answer_without_a_limit_counts_less_than_the_models_whole_context(tokenizer):
    [found] = prepare([(ChatRequest, CHAT)], tokenizer)
    assert (found.sampling.max_tokens, found.answer_tokens) == (None, [4096])


def test_tokens_that_wait_are_bounded_for_each_client_and_in_all(tokenizer):
    engine = scripted(tokenizer, step_s=0.3)
    limits = {"max_queued_tokens": 5000, "max_queued_tokens_per_client": 2500}
    asked = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    with limited_server(tokenizer, engine, **limits) as (served, frontend):
        # A choice counts 1 024 tokens at least.  Beside another request, one may wait, two may not.
        client = client_at("127.0.0.1")
        frontend.limits.queue.take(client, 1000)
        response = served.post("/v1/completions", {**asked, "n": 2})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert not engine.requests, "no choice of a refused request begins"
        assert served.post("/v1/completions", asked).status_code == 200
        frontend.limits.queue.give_back(client, 1000)
        assert frontend.limits.queue.in_all == 0
        frontend.limits.queue.take("another", 4500)
        response = served.post("/v1/completions", asked)
        assert (response.status_code, "retry-after" in response.headers) == (503, True)
        with served.http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as stream:
            assert stream.status_code == 503
        frontend.limits.queue.give_back("another", 4500)
        assert served.post("/v1/completions", asked).status_code == 200
        assert (refused(served, "client_queue"), refused(served, "queue")) == (1, 2)


@pytest.mark.parametrize(("most", "of_client"), [(10, 10), (120_000, 20_000), (20_000, 20_000)])
def test_one_request_may_wait_whatever_it_counts(tokenizer, most, of_client):
    """It was refused for ever, each time with the advice to send it again."""
    limits = {"max_queued_tokens": most, "max_queued_tokens_per_client": of_client}
    with limited_server(tokenizer, **limits) as (served, frontend):
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "a", "n": 20}),
            ("/v1/completions", {"prompt": ["a"] * 24}),
            ("/v1/completions", {"prompt": ["a"] * 24, "n": 2, "use_beam_search": True}),
        ):
            response = served.post(path, {**fields, "max_tokens": 2})
            assert response.status_code == 200, response.text
            assert frontend.limits.queue.in_all == 0
        assert refused(served, "client_queue") == refused(served, "queue") == 0


def test_large_bodies_over_http(tokenizer):
    engine = scripted(tokenizer, max_model_len=40_000)
    with limited_server(tokenizer, engine, check_timeout_s=PATIENCE_S) as (served, frontend):
        text = served.post("/v1/completions", {"prompt": "hello" * 6000, "max_tokens": 1})
        assert text.json()["usage"]["prompt_tokens"] == 30_000 + len(tokenizer.encode(""))
        ids = served.post("/v1/completions", {"prompt": [5] * 30_000, "max_tokens": 1})
        assert ids.json()["usage"]["prompt_tokens"] == 30_000
        wrong = served.post("/v1/completions", {"prompt": [{}] * 100_000})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
        assert frontend.limits.bodies.in_all == 0
