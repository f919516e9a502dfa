# SPDX-License-Identifier: Apache-2.0
"""Tokens of the reasoning in a chat's usage, and reasoning that stays in the content."""

from __future__ import annotations

import pytest

from .test_tools import QWEN, THOUGHT, TOOL, ask, saying

PLAIN = "forty two"


def counted(usage):
    """Both places of the count: OpenAI's and SGLang's."""
    found = usage.completion_tokens_details.reasoning_tokens
    assert usage.reasoning_tokens == found
    return found


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_the_usage_counts_tokens_of_reasoning_as_responses_do(tools):
    with saying(THOUGHT, reasoning_parser="qwen3") as (client, _):
        response = client.responses.create(model="base", input="hello")
        expected = response.usage.output_tokens_details.reasoning_tokens
        usage = ask(client, tools=tools).usage
        assert 0 < expected == counted(usage) < usage.completion_tokens
        assert counted(ask(client, tools=tools, n=2).usage) == 2 * expected
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = ask(client, tools=tools, **options)
        assert counted(last.usage) == expected
        echoed = ask(client, tools=tools, extra_body={"prompt_logprobs": 1})
        assert counted(echoed.usage) == expected


def test_an_answer_without_reasoning_counts_none():
    with saying(PLAIN, reasoning_parser="qwen3") as (client, _):
        assert counted(ask(client).usage) == 0
    with saying(THOUGHT, reasoning_parser="none") as (client, _):
        assert ask(client).usage.completion_tokens_details is None


def test_reasoning_may_stay_in_the_content():
    with saying(THOUGHT, QWEN + "{# </think> #}", reasoning_parser="auto") as (client, _):
        joined = {"extra_body": {"separate_reasoning": False}}
        for tools in ([], [TOOL]):
            message = ask(client, tools=tools, **joined).choices[0].message
            assert message.content == THOUGHT
            assert getattr(message, "reasoning_content", None) is None
            chunks = ask(client, tools=tools, stream=True, **joined)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == THOUGHT
        message = ask(client, extra_body={"separate_reasoning": True}).choices[0].message
        assert (message.content, message.reasoning_content) == (PLAIN, "because")
