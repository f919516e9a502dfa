# SPDX-License-Identifier: Apache-2.0
"""Adapters fetched by a running server, and at its start, over a hub on loopback."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.adapters.peft.files import WEIGHTS_FILE
from moe_lora.adapters.sources import with_local_adapters
from moe_lora.config.cluster import read_cluster
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.serve.server import create_app
from tests.adapters.peft_folders import peft_folder
from tests.loopback_hub import Hub, reached_hub

from .conftest import as_served, frontend_of
from .live_server import Served, ServerThread
from .test_adapters import LOAD, error_of, names


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with reached_hub(monkeypatch) as found:
        found.folders["acme/support"] = peft_folder(tmp_path / "repo", 1)
        yield found


@pytest.fixture
def server(engine, tokenizer, tmp_path):
    frontend = frontend_of(engine, tokenizer)
    sources = SourcesConfig(allow=("hf://acme/*",), folder=str(tmp_path / "cache"))
    frontend.cluster = replace(frontend.cluster, sources=sources)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        yield served


def path_of(server: Served, name: str) -> Path:
    [card] = [card for card in server.get("/v1/adapters").json()["data"] if card["id"] == name]
    return Path(card["path"])


@pytest.mark.parametrize("path", ["hf://acme/support", "acme/support"])
def test_a_load_fetches_the_adapter(hub: Hub, server: Served, tmp_path: Path, path: str) -> None:
    """The second path is AIBrix's form: it loads by the hub's name, then polls /v1/models."""
    assert server.post(LOAD, {"lora_name": "support", "lora_path": path}).status_code == 200
    assert names(server) == ["base", "shout", "support"]
    found = path_of(server, "support")
    assert (found / WEIGHTS_FILE).read_bytes() == (tmp_path / "repo" / WEIGHTS_FILE).read_bytes()
    assert hub.commit("acme/support") in str(found)


def test_a_replacement_at_the_root_is_fetched_again(hub: Hub, server: Served, tmp_path: Path) -> None:
    body = {"lora_name": "support", "lora_path": "hf://acme/support"}
    places = []
    for content in (1, 2):
        peft_folder(tmp_path / "repo", content)
        assert server.post("/load_lora_adapter", body).status_code == 200
        places.append(path_of(server, "support"))
    assert places[0] != places[1]


def test_refusals_name_their_cause(hub: Hub, server: Served) -> None:
    def refused(path: str, status: int = 400) -> str:
        return error_of(server.post(LOAD, {"lora_name": "new", "lora_path": path}), status)

    assert "sources.allow has hf://acme/*" in refused("hf://evil/x")
    assert "is not on the hub" in refused("acme/nobody")
    assert "no LoRA adapter found" in refused("evil/x", 404)
    assert hub.calls == []


def test_a_hub_without_an_answer_is_503(hub: Hub, server: Served, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    response = server.post(LOAD, {"lora_name": "new", "lora_path": "hf://acme/support"})
    assert "send the request again" in error_of(response, 503)


def test_without_sources_an_address_is_refused(engine, tokenizer) -> None:
    with (
        ServerThread(create_app(frontend_of(engine, tokenizer))) as thread,
        as_served(thread.url, engine) as server,
    ):
        response = server.post(LOAD, {"lora_name": "new", "lora_path": "hf://acme/support"})
        assert "--set sources.allow=hf://ORG/*" in error_of(response, 400)


def test_addresses_on_the_command_line_and_in_the_file(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    """The settings hold local folders, below sources.folder."""
    from moe_lora import assemble
    from moe_lora.cli.main import main

    found = []
    monkeypatch.setattr(assemble, "serve", lambda cluster, reload: found.append(cluster))
    monkeypatch.setattr("moe_lora.cli.serve_settings.fit_to_serve", lambda engine, skip_bad: engine)
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "cluster.yaml").write_text(
        f"model_dir: {model}\nadapters: {{a: 'hf://acme/support'}}\n"
        f"sources: {{allow: ['hf://acme/*'], folder: cache}}\n"
    )
    given = ["--set", "sources.allow=hf://acme/*", "--set", f"sources.folder={tmp_path / 'cache'}"]
    for words in (
        ["serve", "--config", str(tmp_path / "cluster.yaml"), "--lora-modules", "b=acme/support"],
        ["serve", str(model), "--lora-modules", "a=hf://acme/support", "b=acme/support", *given],
    ):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        adapters = dict(found[-1].engine.adapters)
        assert set(adapters) == {"a", "b"}
        assert all(path.startswith(str(tmp_path / "cache")) for path in adapters.values())
    role = with_local_adapters(read_cluster(tmp_path / "cluster.yaml"))  # of a host by torchrun
    [(_, path)] = role.engine.adapters
    assert path.startswith(str(tmp_path / "cache"))
    result = CliRunner().invoke(main, ["serve", str(model), "--lora-modules", "a=hf://acme/support"])
    assert "this server fetches no adapters" in result.output


def test_settings_are_read_again_without_a_call_to_the_hub(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    """Of a changed hub too: the warning about changed settings is of the file."""
    from moe_lora import assemble
    from moe_lora.cli.main import main

    found = []
    monkeypatch.setattr(assemble, "serve", lambda *served: found.extend(served))
    monkeypatch.setattr("moe_lora.cli.serve_settings.fit_to_serve", lambda engine, skip_bad: engine)
    file = tmp_path / "cluster.yaml"
    sources = f"sources: {{allow: ['hf://acme/*'], folder: {tmp_path / 'cache'}}}"
    file.write_text(f"model_dir: {tmp_path}\nadapters: {{a: 'hf://acme/support'}}\n{sources}\n")
    result = CliRunner().invoke(main, ["serve", "--config", str(file)])
    assert result.exit_code == 0, result.output
    assert hub.asked == ["acme/support"]
    cluster, reload = found
    assert asyncio.run(reload.read_again(cluster.front_end)) == cluster.front_end
    assert hub.asked == ["acme/support"]
