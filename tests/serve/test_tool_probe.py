# SPDX-License-Identifier: Apache-2.0
"""The probe of canitoolcall judges answers over HTTP: each scenario has the text of a model that can call."""

from __future__ import annotations

import json

import pytest

from tests.patience import PATIENCE_S
from tests.small_tokenizers import byte_level

from .test_tools import EOS, QWEN, saying

canitoolcall = pytest.importorskip("canitoolcall.probe")


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


PEOPLE = [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}]
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
PLACE = {"city": "Berlin", "room": "4.12"}
SAID = {
    "single-call": call("get_weather", city="Paris"),
    "parallel-calls": "\n".join(call("get_weather", city=city) for city in ("Paris", "Tokyo")),
    "no-call": "42",
    "nested-args": call("create_event", title="Design review", attendees=PEOPLE, location=PLACE),
    "unicode-args": f"I save it.\n{call('save_note', **NOTE)}",
    "empty-args": call("get_server_time"),
    "forced-tool-choice": '[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]',
    "tool-result-followup": "18 degrees, clear.",
    "reasoning-then-call": f"<think>\n9.9 is larger\n</think>\n\n{call('record_answer', answer='9.9')}",
}


@pytest.mark.parametrize("tokens_per_step", [1, 7])
def test_the_probe_of_a_server_passes(tokens_per_step):
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    backend = byte_level()
    with saying("", QWEN, tokens_per_step=tokens_per_step, **settings) as (client, engine):
        for scenario in canitoolcall.BUILTIN_SCENARIOS:
            said = backend.encode(SAID[scenario.id], add_special_tokens=False).ids
            engine.answers[None] = [*said, EOS]
            url = str(client.base_url).rstrip("/")
            report = canitoolcall.probe(url, "base", scenarios=[scenario], timeout_s=PATIENCE_S)
            assert report.summary() == {"pass": 3, "fail": 0, "error": 0, "skip": 0}, report.render_text()
            assert not any(outcome.warnings for outcome in report.outcomes)
