# SPDX-License-Identifier: Apache-2.0
"""Agents call two tools in three turns: each call of a random model is forced by a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.patience import PATIENCE_S
from tests.serve.demo_server import demo_server
from tests.serve.test_random_schemas import random_model

pytestmark = pytest.mark.slow

City, Road = Literal["Oslo", "Rome"], Literal["E6", "A1"]
OPTIONS = ("--eager", "--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CONTEXT = 4096
MOST_SEEDS = 40
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}[assistant]"
)


class Trip(BaseModel, extra="forbid"):
    """The end of an agent's work."""

    city: City
    days: int = Field(ge=1, le=9)


def weather(city: City) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def traffic(road: Road) -> str:
    """The traffic of a road."""
    return f"slow on {road}"


def agents_model(folder: Path) -> Path:
    """A random model with room for a conversation, and a template with tools and calls."""
    file = random_model(folder, seed=3) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": CONTEXT}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("agents")
    with demo_server(folder / "log", *OPTIONS, model=agents_model(folder / "model")) as server:
        yield f"{server.url}/v1"


def test_langchain_calls_the_required_tools_in_three_turns(url):
    openai = pytest.importorskip("langchain_openai")
    core = pytest.importorskip("langchain_core.tools")
    tools = {one.__name__: core.tool(one) for one in (weather, traffic)}
    model = openai.ChatOpenAI(
        **{"model": "demo", "base_url": url, "api_key": "x", "max_retries": 0, "timeout": PATIENCE_S},
        **{"temperature": 0.7, "max_tokens": 400},
    )
    bound = model.bind_tools(
        [*tools.values()], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    history: list[Any] = [("user", "hello")]
    for turn in range(3):
        answer = bound.invoke(history, seed=turn)
        [call] = answer.tool_calls
        assert not answer.invalid_tool_calls
        history += [answer, tools[call["name"]].invoke(call)]
        assert history[-1].content.startswith(("sun in ", "slow on "))
    assert bound.invoke(history, seed=3).tool_calls


def test_pydantic_ai_calls_both_tools_before_its_result(url):
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel("demo", provider=providers.OpenAIProvider(base_url=url, api_key="x"))
    settings = {"max_tokens": 400, "timeout": PATIENCE_S, "temperature": 1.5, "parallel_tool_calls": False}
    for seed in range(MOST_SEEDS):
        agent = ai.Agent(model, output_type=Trip, model_settings={**settings, "seed": seed})
        for tool in (weather, traffic):
            agent.tool_plain(tool)
        try:
            found = agent.run_sync("hello", usage_limits=ai.UsageLimits(request_limit=8))
        except ai.exceptions.UsageLimitExceeded:
            continue
        parts = [part for message in found.all_messages() for part in message.parts]
        names = [part.tool_name for part in parts if part.part_kind == "tool-return"]
        if {"weather", "traffic"} <= set(names):
            assert found.output.city in ("Oslo", "Rome")
            return
    pytest.fail(f"no run of {MOST_SEEDS} seeds calls both tools")
