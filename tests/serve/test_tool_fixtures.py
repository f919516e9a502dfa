# SPDX-License-Identifier: Apache-2.0
"""Outputs of real models: the fixtures of the package canitoolcall, through the parsers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_lora.serve.openai.parsers.answers import ParsedChoice
from moe_lora.serve.openai.parsers.choice import AnswerParsers
from moe_lora.serve.openai.parsers.thinking import REASONING_FORMATS

canitoolcall = pytest.importorskip("canitoolcall")
FOLDER = Path(canitoolcall.__file__).parent / "_data" / "fixtures"
FORMATS = {
    "deepseek": ("deepseek_v3", "deepseek_v3"),
    "gemma4": ("gemma4", "gemma4"),
    "glm": ("glm4", "glm4"),
    "gpt-oss": ("harmony", "harmony"),
    "kimi": ("kimi", "kimi"),
    "llama": ("llama3_json", ""),
    "mistral": ("mistral", "mistral"),
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
}
OTHER_FORMATS = ("kimi/k3-", "llama/l4-", "deepseek/v32-", "deepseek/v4-", "deepseek/v41-", "deepseek/dsml-")
DSML = "｜DSML｜"
DIFFERENT = {
    "gemma4/sglang-text-before-call": "white space before a call is dropped",
    "gemma4/sglang-text-around-call": "white space before a call is dropped",
    "gemma4/truncated-second-parallel-call": "a call cut short is content",
    "glm/glm47-missing-last-close-arg-value": "a value without its end is no value",
    "gpt-oss/harmony-marker-in-reasoning": "a mark in text equals the token",
    "gpt-oss/llamacpp-builtin-python-recipient": "code for a built-in tool is reasoning",
    "kimi/k2i-vllm-noise-between-markers": "text between marks is content",
    "mistral/v13think-stop-at-open-marker": "a mark without a call is content",
    "mistral/vllm-v11-think-text": "think tags of another format",
    "qwen3-hermes/truncated-second-parallel-call": "a call cut short is content",
    "qwen3-xml/llamacpp-q35-call-inside-think": "a call within reasoning is reasoning",
    "qwen3-xml/q38-truncated-at-tool-call-open": "a mark without a call is content",
}


def fixtures():
    for family in FORMATS:
        stated = json.loads((FOLDER / family / "family.json").read_text())
        prompts = {one["repo"]: one.get("default_generation_prompt") for one in stated["reference_models"]}
        for path in sorted((FOLDER / family).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                found = json.loads(line)
                found["prompt"] = found.get("generation_prompt") or prompts.get(found["models"][0]) or ""
                if not found["id"].startswith(OTHER_FORMATS) and DSML not in found["raw_output"]:
                    yield found


def parsed(fixture, pieces):
    tool_format, reasoning = FORMATS[fixture["family"]]
    marks, prompt = REASONING_FORMATS.get(reasoning), fixture["prompt"]
    parsers = AnswerParsers(
        tool_format=tool_format,
        reasoning=reasoning,
        is_open=marks is not None and prompt.rfind(marks.opening) > prompt.rfind(marks.closing),
        tools={tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture["tools"]},
    )
    choice, content, reasoning = ParsedChoice(parsers), "", ""
    for piece in (*pieces, None):
        new = choice.read(piece or "", ended=piece is None)
        content, reasoning = content + new.content, reasoning + new.reasoning
    calls = [(call.name, call.arguments) for call in choice.calls]
    return parsers, (content, reasoning, calls)


@pytest.mark.parametrize("fixture", list(fixtures()), ids=lambda fixture: fixture["id"])
def test_an_output_of_a_model_has_its_calls(fixture):
    text = fixture["raw_output"]
    parsers, streamed = parsed(fixture, [*text])
    assert streamed == parsed(fixture, [text])[1]
    pieces, calls = ParsedChoice(parsers).whole(text)
    if fixture["id"] in DIFFERENT:
        return
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    if "expected" not in fixture:
        assert found == []
        return
    expected = fixture["expected"]
    assert found == [(call["name"], call["arguments"]) for call in expected["tool_calls"] or ()]
    assert (pieces.content or None) == (expected.get("content") or None)
    assert (pieces.reasoning or None) == (expected.get("reasoning_content") or None)
