# SPDX-License-Identifier: Apache-2.0
"""Fields on the page of HTTP, honoured and refused, are those of the OpenAPI document and of the bodies."""

from __future__ import annotations

import re

import pytest

from bench.harness.records import ROOT
from bench.pages.http_fields import fields_of
from moe_lora.serve.anthropic.request import MessagesBody
from moe_lora.serve.openai.converted import SHARED
from moe_lora.serve.openai.responses.request import ResponsesBody

from .conftest import app_of

PAGE = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")


def test_the_table_of_fields_is_the_openapi_documents(engine, tokenizer):
    table = fields_of(app_of(engine, tokenizer).openapi())
    assert f"\n{table}\n<!-- end -->" in PAGE
    assert '| 400 in both, unless `null` or `""` | `prompt_embeds stop_regex suffix` |' in table
    assert '| 400 in both, unless `null` or `""` or `{}` | `grammar` |' in table


@pytest.mark.parametrize(("heading", "body"), [("Responses", ResponsesBody), ("Messages", MessagesBody)])
def test_a_section_names_the_fields_of_its_body(heading, body):
    """Fields as in chats stand in the section of Responses alone."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n### ")[0]
    words = set(re.findall(r"\w+", " ".join(re.findall("`([^`]+)`", section))))
    fields = {*body.model_fields, *body.NEUTRAL}
    if heading == "Messages":
        fields -= {*SHARED}
    assert sorted(fields - words) == []
