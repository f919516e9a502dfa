# SPDX-License-Identifier: Apache-2.0
"""Fields that turn reasoning on or off reach the variable that the chat template reads."""

from __future__ import annotations

import contextlib

import pytest

from .conftest import scripted, serving

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
READ = "{% if NAME is defined %}{{ ' on' if NAME else ' off' }}{% endif %}"
TEMPLATES = {
    "enable_thinking": READ.replace("NAME", "enable_thinking"),
    "thinking": "{% if not thinking is defined %}{% set thinking = none %}{% endif %}"
    "{{ {none: '', true: ' on', false: ' off'}[thinking] }}",
    "both": READ.replace("NAME", "thinking") + READ.replace("NAME", "enable_thinking"),
    "neither": "{% set thinking = 'a' %}{{ thinking[:0] }}",
}
CHATS, TOKENIZE, COUNT = "/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"
PATHS = pytest.mark.parametrize("path", [CHATS, TOKENIZE])


@pytest.fixture(scope="module")
def servers(tokenizer):
    """Template -> a function from path and fields to the prompt, or to the error."""
    kinds, found = type(tokenizer), {}
    with contextlib.ExitStack() as stack:
        for name, source in TEMPLATES.items():
            told = kinds(tokenizer.backend, chat_template="{{ messages[0].content }}" + source)
            found[name] = sender(stack.enter_context(serving(scripted(told), told)), told)
        yield found


def sender(served, tokenizer):
    def send(path, **fields):
        more = {"max_tokens": 1, "return_token_ids": True} if path == CHATS else {}
        answer = served.post(path, {**HELLO, **more, **fields})
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]
        assert "x-ignored-fields" not in answer.headers
        body = answer.json()
        if path == COUNT:
            return body["input_tokens"]
        return tokenizer.decode(body["prompt_token_ids"] if path == CHATS else body["tokens"])

    return send


FIELDS = [
    ({}, ""),
    *(({"enable_thinking": on}, " on" if on else " off") for on in (False, True)),
    ({"thinking": False}, " off"),
    ({"thinking": {"type": "enabled"}}, " on"),
    ({"thinking": {"type": "disabled"}}, " off"),
    ({"thinking": {}}, ""),
    ({"reasoning_effort": "none"}, " off"),
    ({"enable_thinking": False, "reasoning_effort": "none"}, " off"),
    ({"enable_thinking": True, "reasoning_effort": "high"}, " on"),
    ({"enable_thinking": True, "thinking": {"type": "enabled"}}, " on"),
    ({"thinking": True, "chat_template_kwargs": {"thinking": True, "x": 1}}, " on"),
]


@PATHS
@pytest.mark.parametrize("template", ["enable_thinking", "thinking", "both"])
@pytest.mark.parametrize(("fields", "shown"), FIELDS)
def test_the_template_gets_the_variable_that_it_reads(servers, path, template, fields, shown):
    times = 2 if template == "both" else 1
    assert servers[template](path, **fields) == "hello" + times * shown


@PATHS
@pytest.mark.parametrize(("fields", "shown"), FIELDS)
def test_a_field_that_the_template_cannot_read_is_refused_with_the_way_out(servers, path, fields, shown):
    found = servers["neither"](path, **fields)
    name = next(
        (name for name in ("enable_thinking", "thinking") if fields.get(name) not in (None, {})), None
    )
    if name is None:
        assert found == "hello"
        return
    assert (found[0], found[1]["param"]) == (400, name)
    assert "reads neither enable_thinking nor thinking" in found[1]["message"]
    assert found[1]["message"].endswith("in chat_template_kwargs")


@PATHS
@pytest.mark.parametrize("template", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"enable_thinking": True, "thinking": False}, "thinking"),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "thinking"),
        *(
            ({field: True, "chat_template_kwargs": {variable: False}}, f"chat_template_kwargs.{variable}")
            for field in ("enable_thinking", "thinking")
            for variable in ("enable_thinking", "thinking")
        ),
    ],
)
def test_a_contradiction_is_refused(servers, path, template, fields, other):
    status, error = servers[template](path, **fields)
    assert (status, error["param"]) == (400, next(iter(fields)))
    assert f" contradicts {other}; " in error["message"]


@pytest.mark.parametrize("path", [CHATS, TOKENIZE, "/v1/embeddings"])
@pytest.mark.parametrize(
    "value", [1, "enabled", {"type": "enabled", "budget_tokens": 5}, {"type": ["enabled"]}]
)
def test_another_form_of_thinking_is_refused(servers, path, value):
    status, error = servers["both"](path, thinking=value)
    assert (status, error["param"]) == (400, "thinking")


@pytest.mark.parametrize(("path", "field"), [(TOKENIZE, "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_thinking", False), ("thinking", {"type": "disabled"}), ("reasoning_effort", "low")],
)
def test_a_plain_prompt_has_no_thinking(servers, path, field, name, value):
    status, error = servers["both"](path, messages=None, **{field: "hello", name: value})
    assert (status, error["param"]) == (400, name)
    assert error["message"] == f"{name} needs messages; leave it out"


@pytest.mark.parametrize("template", ["enable_thinking", "thinking"])
def test_messages_tell_the_same_variables(servers, template):
    """A template without such a variable still answers: clients of Messages send `thinking` always."""
    for kind, shown in (("disabled", " off"), ("adaptive", " on")):
        fields = {"thinking": {"type": kind}}
        assert servers[template](COUNT, **fields) == len("hello" + shown)
        assert servers["neither"](COUNT, **fields) == len("hello")
