# SPDX-License-Identifier: Apache-2.0
"""Versions published by a trainer on the server's host, through shared memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file

from moe_lora.core.errors import AdapterError
from moe_lora.integrations.publisher import Publisher
from moe_lora.integrations.verl import SendsSafetensors
from tests.serve.demo_server import DEMO, demo_server
from tests.serve.live_server import wait_until
from tests.serve.test_controls import Http


def parts(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration of a demo adapter."""
    folder = DEMO / "adapters" / name
    return load_file(folder / "adapter_model.safetensors"), json.loads(
        (folder / "adapter_config.json").read_text()
    )


def test_each_name_and_a_long_configuration_reach_the_server(tmp_path: Path) -> None:
    tensors, config = parts("upper")
    names = ["policy", "policy#2", "policy?x", "a%2Fb", "a/b", "team/./x", "ü 2"]
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        for name in names:
            publisher = Publisher(server.url, name)
            assert publisher.publish(tensors, config) == 1
            publisher.close()
        http = Http(server.url)
        assert set(names) <= set(http.ok("GET", "/get_weight_version")["adapters"])
        publisher = Publisher(server.url, "policy")
        long = {**config, "exclude_modules": [f"absent_{number:08}" for number in range(5000)]}
        assert publisher.publish(tensors, long) == 2
        with pytest.raises(AdapterError, match="bias"):
            publisher.publish(tensors, {**long, "bias": "all"})
        publisher.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_that_share_memory_are_published(is_shared: bool, tmp_path: Path) -> None:
    one, folder = torch.arange(8.0).view(2, 4), tmp_path if is_shared else None
    tensors, received = {"a": one, "b": one, "c": one[1:]}, list[dict[str, torch.Tensor]]()

    def answer(request: httpx.Request) -> httpx.Response:
        files = [*tmp_path.glob("*/*.safetensors")]
        received.extend(
            [load_file(files[0])] if files else [load(request.content)] if request.content else []
        )
        return httpx.Response(200, json={"id": "x", "version": 1, "adapters": {"x": 1}})

    publisher = Publisher("http://server", "x", shared=folder)
    publisher._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    assert publisher.publish(tensors, {}) == 1
    _, [sent] = SendsSafetensors().wrap_lora_params({}, tensors.items())
    for found in (received[0], load(sent)):
        assert {name: kept.tolist() for name, kept in found.items()} == {
            name: kept.tolist() for name, kept in tensors.items()
        }


def test_a_server_of_another_user_may_read_shared_files(tmp_path: Path) -> None:
    modes = dict[str, int]()

    def answer(request: httpx.Request) -> httpx.Response:
        [folder] = tmp_path.iterdir()
        for name, one in {"folder": folder, **{one.name: one for one in folder.iterdir()}}.items():
            modes[name] = one.stat().st_mode & 0o777
        return httpx.Response(200, json={"adapters": {"x": 1}})

    publisher = Publisher("http://server", "x", shared=tmp_path)
    publisher._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    usual = os.umask(0o077)
    try:
        publisher._publish_shared({"a": torch.ones(1)}, "{}", tmp_path)
    finally:
        os.umask(usual)
    assert modes == {"folder": 0o755, "adapter_config.json": 0o644, "adapter_model.safetensors": 0o644}


@pytest.mark.parametrize("tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_without_values_and_sparse_ones_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(AdapterError, match=r"a: a tensor .*; give dense tensors with values"):
        Publisher("http://server", "x").publish({"a": tensor}, {})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (httpx.Response(200, json={"id": "b", "version": 1}), r"'a/\.\./b' for 'b'"),
        (httpx.Response(431, text="Header too large"), "status 431: Header too large"),
        (httpx.Response(200, text="<html>sign in"), "status 200: <html>sign in"),
        (httpx.Response(200, json={"ok": True}), r'status 200: \{"ok": *true\}'),
        (httpx.Response(200, json={"id": "a/../b", "version": None}), "status 200: "),
        (httpx.Response(200, json=[]), r"status 200: \[\]"),
    ],
    ids=["another name", "a proxy's text", "a proxy's page", "other keys", "no version", "a list"],
)
def test_a_proxy_s_answer_is_an_error_with_its_cause(answer: httpx.Response, problem: str) -> None:
    publisher = Publisher("http://server", "a/../b")
    publisher._http = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda request: answer)
    )
    with pytest.raises(AdapterError, match=problem):
        publisher.publish(*parts("upper"))


def test_an_answer_without_the_name_s_version_is_an_error(tmp_path: Path) -> None:
    publisher = Publisher("http://server", "policy", shared=tmp_path)
    found = httpx.Response(200, json={"adapters": {}})
    publisher._http = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda request: found)
    )
    with pytest.raises(AdapterError, match=r"at http://\S+ did not accept 'policy': status 200: .*adapters"):
        publisher.publish(*parts("upper"))


@pytest.mark.parametrize("call", ["publish", "publish_shared", "remove"])
@pytest.mark.parametrize("kind", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError])
def test_a_server_without_an_answer_is_an_error_of_the_adapter(
    call: str, kind: type[httpx.TransportError], tmp_path: Path
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise kind("gone", request=request)

    publisher = Publisher("http://server", "policy", shared=tmp_path if call == "publish_shared" else None)
    publisher._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    with pytest.raises(
        AdapterError, match=f"no answer about 'policy' from http://server.*{kind.__name__}: gone"
    ):
        publisher.remove() if call == "remove" else publisher.publish(*parts("upper"))


def test_versions_in_shared_memory_outlive_their_folder_and_an_instance(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        http = Http(server.url)
        publisher = Publisher(server.url, "policy", shared=shared)
        texts = []
        for version, name in enumerate(("upper", "reverse", "upper"), 1):
            tensors, config = parts(name)
            assert publisher.publish(tensors, config) == version
            assert not list(shared.iterdir())
            answer = http.complete("policy")
            assert answer["adapter_version"] == version
            texts.append(answer["text"])
        assert texts[0] == texts[2] != texts[1]
        pid = server.engine_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.engine_pids() not in ([], [pid]), "the next process has started")
        wait_until(lambda: http("GET", "/health").status_code == 200, "the next process serves")
        assert http.complete("policy")["text"] == texts[2]
        with pytest.raises(AdapterError, match="NaN or infinite"):
            publisher.publish({key: tensor / 0 for key, tensor in tensors.items()}, config)
        assert not list(shared.iterdir())
        assert http.complete("policy")["text"] == texts[2]
        publisher.close()
