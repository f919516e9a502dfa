# SPDX-License-Identifier: Apache-2.0
"""Tools and reasoning over HTTP, with the client of OpenAI: the model's text is forced."""

from __future__ import annotations

import json
from contextlib import contextmanager

import httpx
import openai
import pytest

from moe_lora.config import LimitsConfig
from moe_lora.core.request import ThinkingLimit
from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.openai.parsers.choice import parsers_for
from moe_lora.serve.openai.parsers.json_calls import ForcedCalls
from moe_lora.serve.openai.preparing import rendered
from moe_lora.serve.openai.protocol import ChatRequest
from tests.small_tokenizers import byte_level

from .conftest import app_of
from .demo_server import demo_server
from .live_server import ServerThread
from .scripted_engine import ScriptedEngine

EOS = 1
QWEN = (
    "{% if tools %}TOOLS{{ tools | tojson }}<tool_call>{% endif %}{% if reasoning_effort %}EFFORT "
    "{{ reasoning_effort }} {% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}[assistant]{% if think %}<think>\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WRONG_SCHEMA = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"type": "?"}}}},
}
WILD_SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://tools.example/book.json",
    "title": "Book",
    "type": "object",
    "properties": {
        "ids": {"type": "array", "items": {"$ref": "#/$defs/id"}, "uniqueItems": True, "maxItems": 2},
        "how": {"oneOf": [{"const": "a"}, {"type": "integer", "maximum": 9, "minimum": 0}]},
        "data": {"enum": [{"$ref": "#/nowhere"}]},
        "file": {"type": "string", "format": "binary", "maxLength": 3},
    },
    "required": ["ids", "how", "data"],
    "additionalProperties": False,
    "propertyNames": {"pattern": "^[a-z]+$"},
    "not": {"required": ["none"]},
    "$defs": {"id": {"enum": [1, 2]}},
}
USER = {"role": "user", "content": "hello"}
CITY = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
FLAG = {
    "type": "function",
    "function": {
        "name": "flag",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def saying(text, template=QWEN, special=(), tokens_per_step=1, max_model_len=8192, **front_end):
    """An openai client of a server that says `text`, and the engine."""
    backend = byte_level()
    backend.add_special_tokens(list(special))
    tokenizer = Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=template
    )
    answer = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    engine = ScriptedEngine(
        {None: answer},
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        tokens_per_step=tokens_per_step,
    )
    engine.prompts = lambda: [
        tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) for one in engine.requests
    ]
    with (
        ServerThread(app_of(engine, tokenizer, **front_end)) as thread,
        openai.OpenAI(base_url=f"{thread.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, engine


def ask(client, **body):
    return client.chat.completions.create(model="base", **{"messages": [USER], "tools": [TOOL], **body})


def streamed(client, **body):
    """Content, reasoning, calls by index, and the last reason."""
    content, reasoning, calls, reason, pieces = "", "", {}, None, 0
    for chunk in ask(client, stream=True, **body):
        [choice] = chunk.choices
        reason = choice.finish_reason or reason
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            call["arguments"] += part.function.arguments or ""
            pieces += 1
    return content, reasoning, calls, reason, pieces


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_a_call_is_whole_and_in_pieces(tokens_per_step):
    with saying(f"Let me see. {CALL}", tokens_per_step=tokens_per_step) as (client, engine):
        whole = ask(client)
        content, _, calls, reason, pieces = streamed(client)
    choice = whole.choices[0]
    assert choice.finish_reason == reason == "tool_calls"
    assert choice.message.content == content == "Let me see."
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert calls[0]["id"].startswith("call_")
    assert (calls[0]["name"], calls[0]["arguments"]) == ("weather", call.function.arguments)
    assert pieces > 3
    assert all(f"TOOLS{json.dumps([TOOL])}" in prompt for prompt in engine.prompts())


def test_the_helper_of_the_client_collects_a_stream():
    with (
        saying(f"{CALL}\n{CALL}") as (client, _),
        client.chat.completions.stream(model="base", messages=[USER], tools=[TOOL]) as stream,
    ):
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"city": "Oslo"}'] * 2
    assert len({call.id for call in calls}) == 2


def test_one_call_at_a_time():
    with saying(f"{CALL}\n{CALL}") as (client, _):
        assert len(ask(client).choices[0].message.tool_calls) == 2
        assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
        assert len(streamed(client, parallel_tool_calls=False)[2]) == 1


def test_each_choice_has_its_own_calls():
    with saying(CALL) as (client, _):
        choices = ask(client, n=3).choices
        found = {}
        for chunk in ask(client, n=3, stream=True):
            [choice] = chunk.choices
            for part in choice.delta.tool_calls or ():
                found[choice.index] = found.get(choice.index, "") + (part.function.arguments or "")
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1, 1]
    assert found == dict.fromkeys(range(3), '{"city": "Oslo"}')


def test_without_a_choice_of_tools_a_call_is_text():
    with saying(CALL) as (client, engine):
        for body in ({"tool_choice": "none"}, {"tools": []}, {"tools": openai.omit}):
            choice = ask(client, **body).choices[0]
            assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
            assert choice.message.tool_calls is None
    assert "TOOLS" in engine.prompts()[0]
    assert "TOOLS" not in engine.prompts()[1]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Os',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    ],
)
def test_a_malformed_call_is_text(text):
    with saying(text) as (client, _):
        choice = ask(client).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert streamed(client)[3] in ("stop", "tool_calls")


def test_a_call_cut_by_the_limit_ends_with_length():
    with saying(CALL) as (client, _):
        choice = ask(client, max_tokens=40).choices[0]
        assert choice.finish_reason == "length"
        assert streamed(client, max_tokens=40)[3] == "length"


@pytest.mark.parametrize("cut", [1, 2, 12, 25])
def test_a_forced_call_cut_by_the_limit_is_a_call_as_in_a_stream(cut):
    """A limit within the arguments, or before the brackets after them."""
    with saying('[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]') as (client, engine):
        body = {"tool_choice": "required", "max_tokens": len(engine.answers[None]) - 1 - cut}
        choice = ask(client, **body).choices[0]
        content, _, calls, reason, _ = streamed(client, **body)
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == (calls[0]["name"], calls[0]["arguments"])
    assert (choice.message.content or "", choice.finish_reason) == (content, reason) == ("", "length")


HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": null}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def test_past_calls_reach_the_template_as_objects():
    with saying("ok") as (client, engine):
        ask(client, messages=HISTORY)
    assert '<tool_call>weather{"city": "Oslo", "days": null}[tool]sunny[assistant]' in engine.prompts()[-1]


@pytest.mark.parametrize("join", ["+", "~"])
def test_a_template_for_texts_gets_past_arguments_as_text(join):
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{{{{ '<' {join} c.function.arguments {join} '>' }}}}{{% endfor %}}{{% endfor %}}"
    )
    with saying("ok", source) as (client, engine):
        ask(client, messages=HISTORY, tools=[])
    assert '<{"city": "Oslo", "days": null}>' in engine.prompts()[-1]


@pytest.mark.parametrize("arguments", ["{oops", "", "[1]", "7"])
def test_past_arguments_of_any_text_are_no_error(arguments):
    history = json.loads(json.dumps(HISTORY))
    history[1]["tool_calls"][0]["function"]["arguments"] = arguments
    with saying("ok") as (client, engine):
        ask(client, messages=history)
    expected = json.dumps(arguments or {})
    assert f"weather{expected}[tool]" in engine.prompts()[-1]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            {"tool_choice": "required", "extra_body": {"guided_regex": "a"}},
            "tool_choice",
            "both give a grammar",
        ),
        (
            {"tool_choice": "required", "tools": [WRONG_SCHEMA]},
            "tool_choice",
            "tool_choice: ",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": WILD_SCHEMA},
                    }
                ],
            },
            "tool_choice",
            "propertyNames",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tool_choice": {}}, "tool_choice", "must be"),
        ({"tool_choice": "any"}, "tool_choice", "none"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tools": [{}]}, "tools", "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools", "tools[1]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools",
            "JSON schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
        ({"tools": {"a": 1}}, "tools", "list"),
        ({"tools": [TOOL] * 1025}, "tools", "at most 1024"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
        ({"reasoning_effort": "immense"}, "reasoning_effort", "high"),
        ({"extra_body": {"include_reasoning": False}}, "include_reasoning", "reasoning_parser"),
    ],
)
def test_wrong_fields_are_refused_by_name(body, param, words):
    with saying("ok") as (client, _), pytest.raises(openai.BadRequestError) as error:
        ask(client, **body)
    assert error.value.param.startswith(param)
    assert words in error.value.message


def test_tools_need_a_template_with_a_format_or_a_named_parser():
    with saying(CALL, "{{ messages[0].content }}") as (client, _):
        with pytest.raises(openai.BadRequestError, match="no known format") as error:
            ask(client)
        assert error.value.param == "tools"
        assert ask(client, tool_choice="none").choices[0].message.content == CALL
    with saying(CALL, "{{ messages[0].content }}", tool_call_parser="hermes") as (client, _):
        assert ask(client).choices[0].finish_reason == "tool_calls"
    with (
        saying(CALL, tool_call_parser="none") as (client, _),
        pytest.raises(openai.BadRequestError, match="tool_call_parser=none"),
    ):
        ask(client)


def test_a_strict_function_in_a_format_without_its_grammar_is_refused():
    tools = [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": {}}}]
    with saying(CALL, tool_call_parser="gemma4") as (client, _):
        with pytest.raises(openai.BadRequestError, match="not supported for the calls of gemma4") as error:
            ask(client, tools=tools)
        assert error.value.param == "tools"
        assert ask(client).choices[0].finish_reason == "stop"


def test_special_tokens_of_a_format_are_read_and_others_left_out():
    template = "{{ messages[0].content }}{{ tools }}[TOOL_CALLS]"
    text = '[TOOL_CALLS]weather[ARGS]<s>{"city": "Oslo"}'
    with saying(text, template, special=("[TOOL_CALLS]", "[ARGS]")) as (client, _):
        [call] = ask(client).choices[0].message.tool_calls
        assert call.function.arguments == streamed(client)[2][0]["arguments"] == '{"city": "Oslo"}'
        assert (len(call.id), call.id.isalnum()) == (9, True)
        assert ask(client, tools=[]).choices[0].message.content == 'weather{"city": "Oslo"}'


HARMONY = (
    "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
)
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>")


def test_harmony_has_calls_and_reasoning():
    template = "{{ messages[0].content }}{{ tools }}{{ reasoning_effort }}<|start|>assistant{# <|channel|> #}"
    with saying(HARMONY, template, special=HARMONY_MARKS) as (client, engine):
        message = ask(client, reasoning_effort="high").choices[0].message
        assert message.reasoning_content == message.reasoning == "Which city?"
        assert message.content is None
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        content, reasoning, calls, reason, _ = streamed(client)
        assert "high" in engine.prompts()[0]
    assert (content, reasoning, reason) == ("", "Which city?", "tool_calls")
    assert calls[0]["arguments"] == '{"city": "Oslo"}'


THOUGHT = "<think>\nbecause\n</think>\n\nforty two"


@pytest.mark.parametrize("setting", ["auto", "qwen3", "deepseek_r1"])
def test_reasoning_is_apart_from_the_answer(setting):
    with saying(THOUGHT, QWEN + "{# </think> #}", reasoning_parser=setting) as (client, engine):
        for tools in ([], [TOOL]):
            message = ask(client, tools=tools).choices[0].message
            assert message.reasoning_content == message.reasoning == "because"
            assert message.content == "forty two"
            assert streamed(client, tools=tools)[:2] == ("forty two", "because")
        hidden = ask(client, extra_body={"include_reasoning": False}).choices[0].message
        assert (hidden.content, hidden.reasoning_content) == ("forty two", None)
        assert ask(client, reasoning_effort="low").choices[0].message.content == "forty two"
        assert "EFFORT low" in engine.prompts()[-1]


def test_a_budget_of_reasoning_reaches_the_engine():
    marks = ("<think>", "</think>")
    with saying(THOUGHT, special=marks, reasoning_parser="qwen3") as (client, engine):
        for fields, expected in (
            ({}, ThinkingLimit(9, *((engine.vocab_size - 2 + one,) for one in range(2)))),
            ({"chat_template_kwargs": {"think": True}}, ThinkingLimit(8, (), (engine.vocab_size - 1,))),
        ):
            ask(client, extra_body={"thinking_token_budget": 9, **fields})
            assert engine.requests[-1].sampling.thinking == expected
            body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 9, **fields}
            root = str(client.base_url).removesuffix("v1/")
            rendered = httpx.post(f"{root}v1/chat/completions/render", json=body).json()
            httpx.post(f"{root}inference/v1/generate", json=rendered).raise_for_status()
            assert engine.requests[-1].sampling.thinking == expected
        ask(client, extra_body={"thinking_token_budget": -1})
        assert engine.requests[-1].sampling.thinking is None
        for wrong in (-2, 1.5, "9"):
            with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
                ask(client, extra_body={"thinking_token_budget": wrong})
    with (
        saying(THOUGHT, reasoning_parser="none") as (client, _),
        pytest.raises(openai.BadRequestError, match="needs a reasoning parser"),
    ):
        ask(client, extra_body={"thinking_token_budget": 9})


@pytest.mark.parametrize(("budget", "left"), [(9, 5), (4, 0), (2, 0)])
def test_reasoning_of_the_prompt_counts_in_its_budget(budget, left):
    marks = ("<think>", "</think>")
    begun = {"role": "assistant", "content": "<think>abcd"}
    with saying(THOUGHT, special=marks, reasoning_parser="qwen3") as (client, engine):
        body = {"continue_final_message": True, "add_generation_prompt": False}
        ask(client, messages=[USER, begun], extra_body={**body, "thinking_token_budget": budget})
        assert len(engine.requests[-1].prompt_token_ids) > 4
        assert engine.requests[-1].sampling.thinking == ThinkingLimit(left, (), (engine.vocab_size - 1,))


def test_a_prompt_may_open_the_reasoning():
    with saying("because</think>so", reasoning_parser="qwen3") as (client, _):
        opened = {"extra_body": {"chat_template_kwargs": {"think": True}}}
        message = ask(client, **opened).choices[0].message
        assert (message.reasoning_content, message.content) == ("because", "so")
        assert ask(client).choices[0].message.content == "because</think>so"


def test_a_continued_message_may_be_inside_the_reasoning():
    begun = {"role": "assistant", "content": "<think>well, it is a long story, and so"}
    with saying(" on</think>so", reasoning_parser="qwen3") as (client, _):
        body = {"continue_final_message": True, "add_generation_prompt": False}
        message = ask(client, messages=[USER, begun], extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("on", "so")


def test_no_effort_turns_thinking_off():
    source = "{{ messages[0].content }}{{ reasoning_effort }}{{ enable_thinking }}"
    with saying("ok", source) as (client, engine):
        for body in ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}):
            ask(client, tools=openai.omit, **body)
        kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        ask(client, tools=openai.omit, reasoning_effort="none", **kwargs)
    assert [one.removeprefix("hello") for one in engine.prompts()] == ["noneFalse", "low", "noneTrue"]


def test_without_a_parser_reasoning_is_text():
    with saying(THOUGHT, QWEN + "{# </think> #}") as (client, _):
        message = ask(client, tools=[]).choices[0].message
    assert message.content == THOUGHT
    assert not hasattr(message, "reasoning_content")


def test_log_probabilities_and_ids_stay_with_their_pieces():
    with saying(CALL) as (client, _):
        body = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        whole = ask(client, **body).choices[0]
        ids, logprobs = [], 0
        for chunk in ask(client, stream=True, **body):
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            if chunk.choices[0].logprobs is not None:
                logprobs += len(chunk.choices[0].logprobs.content)
    assert whole.token_ids == ids
    assert len(whole.logprobs.content) == logprobs == len(ids)


def test_a_large_body_with_tools_is_prepared_apart():
    with saying(CALL) as (client, engine):
        engine.max_model_len = 1 << 16
        long = {**TOOL, "function": {**TOOL["function"], "description": "x" * 20000}}
        choice = ask(client, tools=[long]).choices[0]
    assert choice.message.tool_calls[0].function.name == "weather"


def test_a_real_model_answers_with_tools_under_options_of_vllm(tmp_path):
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with (
        demo_server(tmp_path / "log", "--eager", *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        body = {"model": "demo", "messages": [USER], "tools": [TOOL], "temperature": 0, "max_tokens": 12}
        message = client.chat.completions.create(**body).choices[0].message
        chunks = list(client.chat.completions.create(**body, stream=True))
        plain = client.chat.completions.create(**{**body, "tools": []}).choices[0].message
        forced = {**body, "max_tokens": 200, "temperature": 1, "seed": 1, "tools": [CITY, FLAG]}
        forced["extra_body"] = {"bad_words": ["<"]}  # no reasoning: the model would not end it
        named = {"type": "function", "function": {"name": "flag"}}
        required = [
            client.chat.completions.create(**forced, tool_choice=choice).choices[0]
            for choice in ("required", named)
        ]
        streamed = list(client.chat.completions.create(**forced, tool_choice=named, stream=True))
        wild = {"type": "function", "function": {"name": "book", "parameters": WILD_SCHEMA}}
        booked = [
            client.chat.completions.create(
                **{**forced, "tools": [CITY, wild], "seed": seed},
                tool_choice={"type": "function", "function": {"name": "book"}},
            ).choices[0]
            for seed in range(2)
        ]
    assert any(choice.finish_reason == "tool_calls" for choice in booked)
    for choice in booked:
        if choice.finish_reason == "tool_calls":
            found = json.loads(choice.message.tool_calls[0].function.arguments)
            assert set(found["ids"]) <= {1, 2}
            assert found["data"] == {"$ref": "#/nowhere"}
    assert message.content
    assert message.content == plain.content
    assert message.tool_calls is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    for choice in required:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert arguments in ({"on": True}, {"on": False}, {"city": "Oslo"}, {"city": "Rome"})
            assert ("on" in arguments) == (call.function.name == "flag")
    [call] = required[1].message.tool_calls
    assert call.function.name == "flag"
    deltas = [one for chunk in streamed for one in chunk.choices[0].delta.tool_calls or []]
    assert "".join(one.function.arguments or "" for one in deltas) == call.function.arguments


FORCED = '[{"name": "a", "arguments": {"x": [1, "]"]}}, {"name":"b","arguments":{}} ]'


@pytest.mark.parametrize("cut", range(len(FORCED)))
def test_forced_calls_are_read_at_every_cut(cut):
    parser = ForcedCalls({})
    events = [*parser.push(FORCED[:cut]), *parser.push(FORCED[cut:]), *parser.end()]
    texts = {kind: [one.text for one in events if one.kind == kind] for kind in ("call", "content")}
    assert texts == {"call": ["a", "b"], "content": []}
    assert "".join(one.text for one in events if one.kind == "arguments") == '{"x": [1, "]"]}{}'


STATES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}|{% if think %}<think>\n{% elif think is defined %}<think></think>"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    "text", ["no mark", "ends in <think>", "has <think> within", "<think>a</think>", "<think>"]
)
@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, (False, False)),
        ({"chat_template_kwargs": {"think": True}}, (True, False)),
        ({"chat_template_kwargs": {"think": False}}, (False, True)),
        ({"begun": "The tag"}, (False, False)),
        ({"begun": "<think>a"}, (True, False)),
        ({"begun": "<think>a</think>b"}, (False, True)),
    ],
)
def test_marks_in_a_user_s_text_begin_no_reasoning(text, fields, state):
    tokenizer = Tokenizer(byte_level(), chat_template=STATES)
    messages = [{"role": "user", "content": text}]
    if begun := fields.get("begun"):
        messages.append({"role": "assistant", "content": begun})
        fields = {"continue_final_message": True}
    body = ChatRequest.model_validate({"messages": messages, **fields})
    prompt = tuple(tokenizer.encode(rendered(body, tokenizer), add_special_tokens=False))
    found = parsers_for(body, prompt, tokenizer, LimitsConfig(reasoning_parser="qwen3"), "")
    assert (found.is_open, found.is_closed) == state
