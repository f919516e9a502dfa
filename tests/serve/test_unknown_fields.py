# SPDX-License-Identifier: Apache-2.0
"""Fields of other servers: neutral values are taken, telling ones refused, unknown ones ignored and named."""

from __future__ import annotations

import logging
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.serve.openai.fields import (
    IGNORED,
    MAX_NAMED,
    NEUTRAL,
    _edits,
    check_unknown,
    chooses_adapter,
)
from moe_lora.serve.openai.protocol import ChatRequest, CompletionRequest

from .test_limits import limited_server

HEADER = "x-ignored-fields"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
PROMPT = {"prompt": "hello", "max_tokens": 1}
ENDPOINTS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)]
)
# Field names and defaults of the request models of vLLM (2026-08) and SGLang 0.5, facts from their sources.
VLLM = {
    **{"add_generation_prompt": True, "add_special_tokens": True, "allowed_token_ids": None, "bad_words": []},
    **{"cache_salt": None, "chat_template": None, "chat_template_kwargs": None},
    **{"continue_final_message": False, "documents": None, "ec_transfer_params": None, "echo": False},
    **{"frequency_penalty": None, "ignore_eos": False, "include_reasoning": True},
    **{"include_stop_str_in_output": False, "kv_transfer_params": None, "length_penalty": 1.0},
    **{"logit_bias": None, "logits_processors": None, "logprob_token_ids": None, "logprobs": None},
    **{"max_completion_tokens": None, "max_repetition_pattern_size": 0, "max_tokens": 1},
    **{"media_io_kwargs": None, "min_p": None, "min_repetition_pattern_size": 0, "min_tokens": 0},
    **{"mm_processor_kwargs": None, "model": None, "n": 1, "parallel_tool_calls": True},
    **{"presence_penalty": None, "priority": 0, "prompt_embeds": None, "prompt_logprobs": None},
    **{"reasoning_effort": None, "repetition_detection": None, "repetition_min_count": 0},
    **{"repetition_penalty": None, "response_format": None, "return_mm_kwargs": True},
    **{"return_prompt_text": None, "return_token_ids": None, "return_token_offsets": False},
    **{"return_tokens_as_token_ids": None, "routed_experts_prompt_start": 0, "seed": None},
    **{"session_id": None, "skip_special_tokens": True, "spaces_between_special_tokens": True, "stop": []},
    **{"stop_token_ids": [], "stream": False, "stream_interval": None, "stream_options": None},
    **{"structured_outputs": None, "suffix": None, "temperature": None, "thinking_token_budget": None},
    **{"tool_choice": "none", "tools": None, "top_k": None, "top_logprobs": 0, "top_p": None},
    **{"truncate_prompt_tokens": None, "truncation_side": None, "use_beam_search": False, "user": None},
    **{"vllm_xargs": None, "watermarking": None},
}
SGLANG = {
    **{"bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None, "custom_labels": None},
    **{"custom_logit_processor": None, "custom_params": None, "data_parallel_rank": None},
    **{"disagg_prefill_dp_rank": None, "ebnf": None, "extra_key": None, "images_config": None},
    **{"input_ids": None, "json_schema": None, "lora_path": None, "max_dynamic_patch": None},
    **{"min_dynamic_patch": None, "ngram_corpus_id": None, "no_stop_trim": False, "regex": None},
    **{"return_cached_tokens_details": False, "return_hidden_states": False, "return_meta_info": False},
    **{"return_prompt_token_ids": False, "return_routed_experts": False, "rid": None, "routed_dp_rank": None},
    **{"routed_experts_start_len": 0, "separate_reasoning": True, "session_id": None},
    **{"session_params": None, "stop_regex": None, "stream_reasoning": True, "task": None},
    **{"use_audio_in_video": False, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "seed": -1},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "return_logprob": False, "top_logprobs_num": 0},
    **{"token_ids_logprob": None},
}
WITHOUT_EFFECT = {
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "extra_key")),
    **dict.fromkeys(("data_parallel_rank", "disagg_prefill_dp_rank", "ngram_corpus_id", "routed_dp_rank")),
    **dict.fromkeys(("session_id",)),
}
"""Fields of both that change where or how soon an answer is computed, not what it is."""


def error_of(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@ENDPOINTS
@pytest.mark.parametrize("defaults", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_body_of_another_servers_defaults_is_taken(any_server, path, body, defaults):
    kind = ChatRequest if "messages" in body else CompletionRequest
    fields = {**defaults, "logprobs": None if "prompt" in body else False, **body}
    answer = any_server.post(path, fields)
    assert answer.status_code == 200, answer.text
    ignored = {name for name in answer.headers.get(HEADER, "").split(", ") if name}
    assert ignored - set(WITHOUT_EFFECT) <= set(ChatRequest.model_fields) - set(kind.model_fields)


@pytest.mark.parametrize("name", sorted({*VLLM, *SGLANG} - set(WITHOUT_EFFECT)))
def test_every_field_of_vllm_and_sglang_that_changes_an_answer_is_known(name):
    own = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert chooses_adapter(name) or name in {*own, *IGNORED, *NEUTRAL}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        # The default run has each field at one of the two.
        pytest.param(*endpoint, name, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, name in enumerate(sorted(NEUTRAL))
        for j, endpoint in enumerate((("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)))
    ],
)
def test_a_value_that_would_change_the_answer_is_refused(unchanged, path, body, name):
    if name not in (ChatRequest if "messages" in body else CompletionRequest).model_fields:
        error = error_of(unchanged.post(path, {**body, name: [{"telling": 1}]}))
        assert (error["param"], error["message"].startswith(f"{name} is not supported")) == (name, True)
    for neutral in NEUTRAL[name]:
        answer = unchanged.post(path, {**body, name: neutral})
        assert (answer.status_code, HEADER in answer.headers) == (200, False)


FURTHER = [
    ("thinking_budget", 512, "thinking_token_budget"),
    ("grammar", 'root ::= "a"', "structured_outputs.grammar"),
    ("guided_decoding", {"choice": ["a"]}, "structured_outputs"),
    ("response_schema", {"type": "object"}, "response_format"),
    ("json_mode", True, "response_format"),
    ("format", "json", "response_format"),
    ("num_beams", 4, "use_beam_search"),
    ("no_repeat_ngram_size", 3, ""),
    ("typical_p", 0.5, ""),
    ("min_length", 3, "min_tokens"),
    ("stop_sequences", ["a"], "stop"),
]
"""Fields of further servers, values, and fields with their effect."""


@ENDPOINTS
@pytest.mark.parametrize(("name", "value", "instead"), FURTHER)
def test_a_field_of_further_servers_is_refused_with_the_way_out(unchanged, path, body, name, value, instead):
    error = error_of(unchanged.post(path, {**body, name: value}))
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported; leave it out, or send null")
    has_it = "messages" in body or not instead.startswith("thinking")
    end = f"; or send {instead} instead" if has_it else f"; chats have {instead}"
    assert ("instead" in error["message"]) == (has_it and instead != "")
    assert not instead or error["message"].endswith(end)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 1}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_other_interfaces_name_their_own_fields(unchanged, path, body):
    is_message = "messages" in body
    for name, value, instead in (
        ("json_mode", True, "output_config.format" if is_message else "text.format"),
        ("enable_thinking", False, "chat_template_kwargs.enable_thinking"),
        ("grammar", 'root ::= "a"', "structured_outputs.grammar"),
        ("thinking_budget", 5, "thinking.budget_tokens" if is_message else ""),
    ):
        error = unchanged.post(path, {**body, name: value}).json()["error"]
        assert not instead or error["message"].endswith(f"; or send {instead} instead"), error


@pytest.mark.parametrize(("name", "value"), [("enable_thinking", False), ("thinking", {"type": "enabled"})])
def test_a_prompt_without_a_template_has_no_field_for_thinking(unchanged, name, value):
    error = error_of(unchanged.post("/v1/completions", {**PROMPT, name: value}))
    assert error["message"].endswith("chats have chat_template_kwargs.enable_thinking")


@pytest.mark.parametrize("value", [{"type": "enabled", "budget_tokens": 5}, {"type": "adaptive"}, {"a": 1}])
def test_a_thinking_of_another_form_is_refused(unchanged, value):
    error = error_of(unchanged.post("/v1/chat/completions", {**CHAT, "thinking": value}))
    assert error["param"] == "thinking"
    assert error["message"].endswith("; thinking_token_budget limits it")


@ENDPOINTS
def test_an_id_that_aborts_nothing_is_refused(unchanged, path, body):
    """Requests of /generate alone are aborted by their rid."""
    error = error_of(unchanged.post(path, {**body, "rid": "mine"}))
    assert (error["param"], error["message"].split(";")[0]) == ("rid", "rid is not supported")


@ENDPOINTS
@pytest.mark.parametrize("mode", ["warn", "error"])
def test_fields_that_choose_an_adapter_are_always_refused(tokenizer, path, body, mode):
    with limited_server(tokenizer, unknown_fields=mode) as (served, _):
        for name in (
            "adapter_id",
            "lora_request",
            "lora_name",
            "adapter",
            "lora_adapter",
            "adapters",
            "adapterId",
            "lora_adapter_name",
            "lora_int_id",
            "loraPath",
            "merged_adapters",
            "useLoRA",
        ):
            for value in ("shout", {"lora_name": "shout"}, [{"id": 0}], 1, True):
                error = error_of(served.post(path, {**body, name: value}))
                assert error["param"] == name
                assert "model" in error["message"]
            assert served.post(path, {**body, name: None}).status_code == 200


@pytest.mark.parametrize("name", ["exploration", "explorationRate", "flora"])
def test_a_word_that_lora_is_a_part_of_chooses_no_adapter(name):
    assert not chooses_adapter(name)


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(any_server, path, body, stream):
    fields = {"chat_id": "c1", "min_score": 3, "step": 5}
    answer = any_server.post(path, {**body, **fields, "stream": stream})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "chat_id, min_score, step")
    assert HEADER not in any_server.post(path, {**body, "stream": stream}).headers


def test_unknown_stream_options_are_named_too(unchanged):
    options = {"include_usage": True, "every": 2}
    answer = unchanged.post("/v1/completions", {**PROMPT, "stream": True, "stream_options": options})
    assert answer.headers[HEADER] == "stream_options.every"
    options = {"inclde_usage": True}
    answer = unchanged.post("/v1/completions", {**PROMPT, "stream": True, "stream_options": options})
    assert "did you mean include_usage" in error_of(answer)["message"]


@ENDPOINTS
def test_unknown_fields_of_a_large_body_are_named_too(any_server, path, body):
    answer = any_server.post(path, {**body, "notes": "x" * 40_000})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "notes")


@ENDPOINTS
def test_unknown_fields_are_refused_where_the_server_is_told_so(tokenizer, path, body):
    with limited_server(tokenizer, unknown_fields="error") as (served, _):
        error = error_of(served.post(path, {**body, "chat_id": "c1"}))
        assert (error["param"], error["message"]) == (
            "chat_id",
            "chat_id is not a field of this request; leave it out",
        )
        answer = served.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x", "note": 1})
        assert error_of(answer)["param"] == "note"


@ENDPOINTS
def test_unused_fields_with_names_near_ours_are_taken(unchanged, path, body):
    """Of OpenRouter; values with an effect are refused by the test of all neutral values."""
    answer = unchanged.post(path, {**body, "top_a": 0, "models": []})
    assert (answer.status_code, HEADER in answer.headers) == (200, False)
    error = error_of(unchanged.post(path, {**body, "top_a": 0.5}))
    assert error["message"] == "top_a is not supported; leave it out, or send null or 0"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("Temperature", "temperature"),
        ("temperatures", "temperature"),
        ("temperaturee", "temperature"),
        ("topP", "top_p"),
        ("stops", "stop"),
        ("sotp", "stop"),
        ("Seed", "seed"),
        ("N", "n"),
        ("Model", "model"),
        ("ignore_EOS", "ignore_eos"),
        ("stop_token_id", "stop_token_ids"),
        ("cacheSalt", "cache_salt"),
        ("stream_option", "stream_options"),
    ],
)
@ENDPOINTS
def test_a_misspelled_field_is_refused_with_the_right_name(unchanged, path, body, name, meant):
    error = error_of(unchanged.post(path, {**body, name: 1}))
    assert (error["param"], error["message"]) == (
        name,
        f"{name} is not a field of this request; did you mean {meant}?",
    )


@settings(deadline=None, max_examples=300)
@given(first=st.text("abc", max_size=8), second=st.text("abc", max_size=8), most=st.integers(1, 2))
def test_few_edits_are_counted_as_by_the_whole_table(first, second, most):
    assert min(_edits(first, second, most), most + 1) == min(_edits(first, second, 8), most + 1)


def test_unknown_names_cost_few_steps_each():
    own = ChatRequest.model_fields
    names = [f"{'xy' * 7}x{number:02d}" for number in range(MAX_NAMED)]
    names[:8] = ["xyz" + name[:-3] for name in own if 14 <= len(name) <= 20][:8]
    num_lines = 0

    def traced(frame, event, arg):
        nonlocal num_lines
        num_lines += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        check_unknown(dict.fromkeys(names), own)
    finally:
        sys.settrace(before)
    assert num_lines < 50 * len(names) * len(own)


def test_a_misspelled_field_of_a_load_is_refused(server):
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "x", "load_in_place": True})
    assert "did you mean load_inplace" in error_of(answer)["message"]
    answer = server.post("/v1/unload_lora_adapter", {"lora_name": "shout", "note": 1})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "note")


def test_each_name_is_logged_once_and_few_in_all(server, caplog):
    with caplog.at_level(logging.WARNING, "moe_lora.serve"):
        for number in range(2 * MAX_NAMED):
            for _ in range(2):
                answer = server.post("/v1/completions", {**PROMPT, f"field{number:03}": 1})
                assert answer.headers[HEADER] == f"field{number:03}"
    lines = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(lines) == MAX_NAMED + 1
    assert sum("field000" in line for line in lines) == 1


@pytest.mark.parametrize("name", ["a, b", "a\r\nX-Evil: 1", "größe", "x" * 5000, "", " "])
def test_any_name_makes_a_header(unchanged, name):
    answer = unchanged.post("/v1/completions", {**PROMPT, name: 1})
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert 0 < len(answer.headers[HEADER]) < 1000
    assert "," not in answer.headers[HEADER]


def test_a_name_that_is_no_text_is_refused(unchanged):
    assert error_of(unchanged.post("/v1/completions", {**PROMPT, "\ud800": 1}))["message"]


def test_many_unknown_fields_are_refused(any_server):
    fields = {f"field{number}": 1 for number in range(MAX_NAMED)}
    assert any_server.post("/v1/completions", {**PROMPT, **fields}).status_code == 200
    error = error_of(any_server.post("/v1/completions", {**PROMPT, **fields, "one_more": 1}))
    assert f"at most {MAX_NAMED}" in error["message"]


def test_fields_inside_messages_and_any_role_go_to_the_template(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.mood }} "
        "{{ m.tool_calls is defined }} {{ 'refusal' in m }} {{ m.name }}\n{% endfor %}"
    )
    told = type(tokenizer)(tokenizer.backend, chat_template=template)
    messages = [
        {"role": "wizard", "content": "a", "mood": "g", "refusal": None, "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "b", "cache_control": {"type": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "i"}], "name": "n"},
    ]
    shown = told.render_chat([one.for_template() for one in ChatRequest(messages=messages).messages])
    assert shown.splitlines() == [
        "wizard a g False False ",
        "tool b  False False ",
        "assistant   True False n",
    ]


@pytest.mark.parametrize(
    "message", [{"role": "wizard", "content": "hello"}, {"role": "user", "content": "hello", "extra": "0"}]
)
def test_messages_as_clients_have_them_are_answered(any_server, message):
    messages = [{"role": "user", "content": "hello"}, message]
    answer = any_server.post("/v1/chat/completions", {**CHAT, "messages": messages})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "contents": "hello"},
        {"role": "", "content": "hello"},
        {"role": 5, "content": "hello"},
        {"role": "x" * 300, "content": "hello"},
        {"role": "\ud800", "content": "hello"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
)
def test_messages_that_would_lose_their_content_are_refused(unchanged, message):
    assert error_of(unchanged.post("/v1/chat/completions", {**CHAT, "messages": [message]}))["message"]
