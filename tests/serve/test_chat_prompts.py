# SPDX-License-Identifier: Apache-2.0
"""The prompt and the sampling that reach the engine."""

from __future__ import annotations

import json

import pytest

from moe_lora.engine.text.text import Tokenizer
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai.parsers import requests
from moe_lora.serve.openai.preparing import rendered
from moe_lora.serve.openai.protocol import ChatRequest
from tests.small_tokenizers import characters

from .conftest import scripted, serving
from .test_bad_input import error_of

USER = {"role": "user", "content": "hello"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DEFAULTS = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}


def prompt_of(source, **body):
    """The text that reaches the engine, or the response."""
    tokenizer = Tokenizer(characters(), special_tokens=TOKENS, chat_template=source)
    engine = scripted(tokenizer)
    with serving(engine, tokenizer) as server:
        response = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **body})
    if response.status_code != 200:
        return response
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_parts_reach_a_template_for_parts_and_texts_do_too():
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " there"}]
    assert prompt_of(source, messages=[{"role": "user", "content": parts}]) == "hello there"
    assert prompt_of(source) == "hello"


def test_parts_reach_a_template_for_texts_as_lines():
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": parts}]
    assert prompt_of("{{ messages[0].content | replace('\n', 'a') }}", messages=messages) == "helloathere"


def test_null_content_is_undefined_as_in_transformers():
    source = "{{ 'b' if messages[1].content is defined else 'a' }}"
    assert prompt_of(source, messages=[USER, {"role": "assistant", "content": None}]) == "a"


def test_a_template_that_prints_whole_messages_sees_fields_in_the_order_of_the_body():
    part = {"cache": "x", "text": "hello", "type": "text"}
    message = {"name": "b", "content": [part], "other": "c", "role": "user"}
    tokenizer = Tokenizer(characters(), chat_template="{{ messages | tojson }}")
    body = ChatRequest.model_validate({"messages": [message]})
    assert rendered(body, tokenizer) == json.dumps([message])


def test_unknown_names_of_templates_are_refused_and_not_kept():
    tokenizer = Tokenizer(characters(), chat_template="{{ messages[0].content }}")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    for number in range(3):
        body = ChatRequest.model_validate({"messages": messages, "chat_template": f"{{{{ {number} }}}}"})
        with pytest.raises(ApiError, match="must be a name of the model's chat templates"):
            rendered(body, tokenizer)
    assert not requests._TAKES_TEXT.get(tokenizer.chat_templates)


def test_a_final_message_goes_on():
    messages = [USER, {"role": "assistant", "content": "fox"}]
    source = "{% for m in messages %}{{ m.content }}</s>{% endfor %}{{ 'a' if add_generation_prompt }}"
    for more in ({}, {"add_generation_prompt": False}):
        assert prompt_of(source, messages=messages, continue_final_message=True, **more) == "hello</s>fox"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = prompt_of(source, messages=messages, **both)
    assert "Leave add_generation_prompt out" in error_of(refused, 400)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_documents_and_the_name_of_a_template_reach_the_template():
    sources = {"default": "a", "rag": "{% for d in documents %}{{ d.text }}{% endfor %}"}
    documents = [{"text": "quick"}, {"text": "fox"}]
    assert prompt_of(sources, documents=documents, chat_template="rag") == "quickfox"
    assert prompt_of(sources, chat_template="") == "a"
    refused = prompt_of(sources, chat_template="{{ messages }}")
    error = error_of(refused, 400)
    assert refused.json()["error"]["param"] == "chat_template"
    assert "must be a name of the model's chat templates (default, rag)" in error


@pytest.mark.parametrize("source", ["{% if %}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"])
def test_errors_of_a_template_are_400(source):
    error = error_of(prompt_of(source), 400)
    assert error.startswith("the chat template")


def sampling_of(path, body):
    tokenizer = Tokenizer(characters(), special_tokens=TOKENS, chat_template="{{ messages[0].content }}")
    engine = scripted(tokenizer, sampling_defaults=DEFAULTS)
    with serving(engine, tokenizer) as server:
        assert server.post(path, {"max_tokens": 1, **body}).status_code == 200
    return engine.requests[-1].sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": [USER]})],
)
def test_the_checkpoint_s_sampling_counts_where_a_request_is_silent(path, body):
    def found(**fields):
        sampling = sampling_of(path, {**body, **fields})
        return {name: getattr(sampling, name) for name in DEFAULTS}

    assert found() == DEFAULTS
    assert found(temperature=None, top_k=None) == DEFAULTS
    assert found(temperature=0) == {**DEFAULTS, "temperature": 0}
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert found(**neutral) == neutral
    assert found(top_k=-1)["top_k"] == 0
