# SPDX-License-Identifier: Apache-2.0
"""Text files beside an adapter, on the demo's server."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest

from .demo_server import DEMO, demo_server
from .live_server import wait_until

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 20, "temperature": 0}


@pytest.fixture
def folder(tmp_path):
    """The demo's adapter "upper" with a template that asks for xyz, whatever the client says."""
    place = shutil.copytree(DEMO / "adapters" / "upper", tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "model" / name, place)
    config = json.loads((place / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}xyz="
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize(("options", "answer"), [([], "ABC"), (["--adapter-chat-template"], "XYZ")])
def test_the_log_says_what_is_used_at_load_and_at_start(tmp_path, folder, options, answer):
    log = tmp_path / "log"
    with demo_server(log, "--eager", "--lora-modules", f"first={folder}", *options) as server:
        passing = shutil.copytree(folder, tmp_path / "passing")
        for name, place in (("own", folder), ("passing", passing)):
            load = {"lora_name": name, "lora_path": str(place)}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load).status_code == 200
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (passing / name).unlink()
        for name in ("first", "own", "passing"):
            response = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "model": name})
            assert response.json()["choices"][0]["message"]["content"] == answer
        effect = "used (--adapter-chat-template)" if options else "ignored without --adapter-chat-template"
        for name in ("first", "own"):
            line = f"adapter {name}: its folder has a chat template: {effect}"
            wait_until(lambda line=line: line in log.read_text(), line)
            assert log.read_text().count(line) == 1


def test_a_changed_template_is_used_by_a_second_name_and_after_a_load_in_place(tmp_path, folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    with demo_server(tmp_path / "log", "--eager", "--adapter-chat-template") as server:

        def load(name: str) -> None:
            body = {"lora_name": name, "lora_path": str(folder)}
            assert httpx.post(f"{server.url}/load_lora_adapter", json=body).status_code == 200

        def answer(name: str) -> str:
            response = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "model": name})
            return response.json()["choices"][0]["message"]["content"]

        load("own")
        assert answer("own") == "XYZ"
        config["chat_template"] = "{{ bos_token }}mno="
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        load("second")
        assert (answer("own"), answer("second")) == ("XYZ", "MNO")
        for _ in range(2):
            load("own")
        assert answer("own") == "MNO"
        (folder / "chat_template.jinja").write_text("{{ bos_token }}xyz=")
        load("own")
        assert answer("own") == "XYZ"
        cards = httpx.get(f"{server.url}/v1/adapters").json()["data"]
        assert {card["id"]: card["version"] for card in cards} == {"own": 3, "second": 1}
