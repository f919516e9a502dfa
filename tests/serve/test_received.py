# SPDX-License-Identifier: Apache-2.0
"""Adapters in bodies: published by name over real servers, and refused as files are."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import pickle
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from starlette.requests import Request
from starlette.types import Message

from moe_lora.serve.admin import received
from moe_lora.serve.admin.adapter_routes import _Files
from moe_lora.serve.http_errors import ApiError
from tests.dist.cluster_jobs import until

from .conftest import frontend_of
from .demo_server import DEMO, DemoServer, demo_server
from .test_controls import SEVERAL, Http

CONFIG = (DEMO / "adapters" / "upper" / "adapter_config.json").read_text()
HEADERS = {"X-Adapter-Config": json.dumps(json.loads(CONFIG))}
MOST_MB = 6
BODIES = "max_bodies_bytes_per_client"
MOST_BODIES_BYTES = 1 << 14
"""Fewer than the bytes of an adapter: tensors count for `received_mb` alone."""


def tensors(name: str) -> dict[str, torch.Tensor]:
    return load_file(DEMO / "adapters" / name / "adapter_model.safetensors")


def headers(name: str) -> dict[str, str]:
    text = (DEMO / "adapters" / name / "adapter_config.json").read_text()
    return {"X-Adapter-Config": json.dumps(json.loads(text))}


of_one = pytest.mark.parametrize("served", [()], indirect=True, ids=["alone"])
"""Tests of one front end: several have the same code."""
of_several = pytest.mark.parametrize(
    "served", [pytest.param((), marks=pytest.mark.slow), SEVERAL], indirect=True, ids=["alone", "several"]
)


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Iterator[DemoServer]:
    folder = tmp_path_factory.mktemp("received")
    root = folder / "adapters"
    for name in ("upper", "reverse", "reverse-r16"):
        shutil.copytree(DEMO / "adapters" / name, root / name)
    options = ("--lora-dir", str(root), "--eager", "--dtype", "float32", *request.param)
    if not request.param:
        options = (*options, "--adapter-root", str(root))
    most = ("--set", f"front_end.received_mb={MOST_MB}", "--set", f"front_end.{BODIES}={MOST_BODIES_BYTES}")
    most = (*most, "--set", f"front_end.max_body_bytes={MOST_BODIES_BYTES}")
    with demo_server(folder / "log", *options, *most) as server:
        if request.param:
            said = r"instance instance-\d dialled in"
            until(lambda: len(re.findall(said, server.log.read_text())) >= 6, server.log.read_text)
        yield server
        server.stop()
        assert not [*root.glob("*received*")]


@pytest.fixture
def http(served) -> Http:
    return Http(served.url)


@of_several
def test_a_name_is_published_again_and_again_and_each_answer_names_its_version(http):
    texts = {name: http.complete(name, 8)["text"] for name in ("upper", "reverse")}
    for version in range(1, 5):
        name = ("upper", "reverse")[version % 2]
        card = http.ok("PUT", "/v1/adapters/team/policy", content=save(tensors(name)), headers=headers(name))
        assert (card["id"], card["version"]) == ("team/policy", version)
        for _ in range(2):
            found = http.complete("team/policy", 8)
            assert (found["adapter_version"], found["text"]) == (version, texts[name])
    assert http.ok("POST", "/v1/unload_lora_adapter", json={"lora_name": "team/policy"})


@of_several
def test_received_files_of_former_versions_are_removed(http):
    def folders() -> set[str]:
        cards = http.ok("GET", "/v1/adapters")["data"]
        return {card["path"] for card in cards if card["id"] == "kept"}

    paths: set[str] = set()
    for _ in range(4):
        http.ok("PUT", "/v1/adapters/kept", content=save(tensors("upper")), headers=headers("upper"))
        paths |= folders()
    [last] = folders()
    assert len(paths) == 4
    assert Path(last).is_dir()
    # A front end removes its own former folders at its next publication.
    assert sum(Path(path).exists() for path in paths) <= 2


@pytest.mark.parametrize(
    "served", [(), pytest.param(SEVERAL, marks=pytest.mark.slow)], indirect=True, ids=["alone", "several"]
)
def test_folders_of_unloaded_adapters_leave_room(http):
    """Each body has 0.2 MB and the limit is 6 MB: 34 names fit only after their unloads."""
    for number in range(34):
        http.ok("PUT", f"/v1/adapters/n{number}", content=save(tensors("upper")), headers=headers("upper"))
        assert http.ok("POST", "/v1/unload_lora_adapter", json={"lora_name": f"n{number}"})


def changed(**more: torch.Tensor) -> bytes:
    return save({**tensors("upper"), **more})


def hostile() -> dict[str, tuple[bytes, str]]:
    good = save(tensors("upper"))
    key = next(iter(tensors("upper")))
    length = struct.unpack("<Q", good[:8])[0]
    wrong = torch.zeros(3, 5)
    return {
        "header bomb": (struct.pack("<Q", 1 << 62) + good[8:], "header"),
        "header beyond the file": (struct.pack("<Q", len(good)) + good[8:], "header"),
        "no header": (good[:8] + b"x" * length + good[8 + length :], "not a readable safetensors file"),
        "truncated": (good[:-100], ""),
        "empty": (b"", ""),
        "NaN": (changed(**{key: torch.full_like(tensors("upper")[key], float("nan"))}), "NaN"),
        "wrong shape": (changed(**{key: wrong}), key),
        "stranger": (changed(**{"base_model.model.nothing.lora_A.weight": wrong}), "nothing"),
        "pickle": (pickle.dumps({"a": 1}), "pickle"),
        "torch.save": (b"PK\x03\x04" + good, "pickle"),
        "too large": (b"\0" * ((MOST_MB << 20) + 1), "received_mb"),
    }


@of_one
@pytest.mark.parametrize("kind", list(hostile()))
def test_a_hostile_body_is_refused_by_name_and_leaves_the_served_version(http, kind):
    body, problem = hostile()[kind]
    http.ok("PUT", "/v1/adapters/guarded", content=save(tensors("upper")), headers=headers("upper"))
    before = http.complete("guarded")
    answer = http("PUT", "/v1/adapters/guarded", content=body, headers=HEADERS)
    assert answer.status_code == (413 if kind == "too large" else 400), answer.text
    assert problem in answer.json()["error"]["message"]
    assert http.complete("guarded") == before


@of_one
@pytest.mark.parametrize(
    ("path", "head", "problem"),
    [
        ("/v1/adapters/a", {}, "X-Adapter-Config is missing"),
        ("/v1/adapters/a", {"X-Adapter-Config": "{"}, "X-Adapter-Config is no JSON object"),
        ("/v1/adapters/a", {"X-Adapter-Config": "[]"}, "X-Adapter-Config is no JSON object"),
        ("/v1/adapters/a", {"X-Adapter-Config": "{}"}, "adapter_config.json"),
        ("/v1/adapters/demo", HEADERS, "the base model's name"),
        ("/v1/adapters/a,b", HEADERS, "lora_name"),
    ],
)
def test_a_wrong_name_or_config_is_named(http, path, head, problem):
    answer = http("PUT", path, content=save(tensors("upper")), headers=head)
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]


def in_base64(content: bytes, **fields: object) -> dict[str, object]:
    text = base64.b64encode(content).decode()
    return {
        "lora_name": "encoded",
        "config_dict": json.loads(CONFIG),
        "serialized_tensors": [text],
        **fields,
    }


@of_several
def test_tensors_in_base64_are_served(http):
    path = "/load_lora_adapter_from_tensors"
    for version in (1, 2):
        body = in_base64(save(tensors("upper")))
        assert http.ok("POST", path, json=body) == {"status": "ok", "success": True}
        assert http.complete("encoded", 8)["adapter_version"] == version
    assert http.complete("encoded", 8)["text"] == http.complete("upper", 8)["text"]


@of_one
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (in_base64(pickle.dumps({"a": 1})), "is a pickle"),
        (in_base64(b"", serialized_tensors="?"), "not base64"),
        (in_base64(b"", serialized_named_tensors=["a"]), "give one of"),
        (in_base64(b"", serialized_tensors=None), "give one of"),
        (in_base64(b"", serialized_tensors=None, serialized_named_tensors=["?"]), "serialized_named_tensors"),
        (in_base64(b"", serialized_tensors=["a", "b"]), "serialized_tensors"),
        (in_base64(b"\0" * ((MOST_MB << 20) + (1 << 16))), f"received_mb={MOST_MB}"),
        (in_base64(b"", load_format="flattened_bucket"), "load_format"),
        (in_base64(b"", lora_name="demo"), "the base model's name"),
        ({**in_base64(b""), "config_dict": {"serialized_tensors": "QQ=="}}, "twice"),
        (in_base64(b"", lora_name="a" * 5_000_000), "bytes beside the file"),
    ],
)
def test_a_wrong_body_in_base64_is_named(http, body, problem):
    answer = http("POST", "/load_lora_adapter_from_tensors", json=body)
    assert answer.status_code == (413 if "received_mb" in problem or "beside" in problem else 400)
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 7, 1400])
@pytest.mark.parametrize("escapes", [{"/": r"\/"}, {"+": r"\u002b", "/": r"\u002F", "=": r"\u003D"}])
def test_escaped_base64_is_read_in_pieces_of_any_size(engine, tokenizer, escapes, size):
    file = save({"a": torch.arange(500, dtype=torch.float32)})
    content = json.dumps(in_base64(b"", lora_name="a" * 3000, serialized_tensors="FILE"))
    coded = base64.b64encode(file).decode()
    assert set(escapes) <= set(coded)
    for plain, escaped in escapes.items():
        coded = coded.replace(plain, escaped)
    whole = content.replace("FILE", coded).encode()
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]

    async def run() -> None:
        ends, scope = asyncio.Event(), {"headers": [(b"content-type", b"application/json")]}
        ends.set()
        request = upload(pieces, asyncio.Queue(), ends, **scope)
        body = received.EncodedBody(request, frontend_of(engine, tokenizer))
        assert b"".join([piece async for piece in body.file()]) == file
        assert await body.words() == ("a" * 3000, json.dumps(json.loads(CONFIG)))

    asyncio.run(run())


@of_one
@pytest.mark.parametrize("header_bytes", [128, 384, 640])
def test_a_file_with_a_pickles_first_byte_is_served(http, header_bytes):
    """The length of a header may begin with the byte of a pickle."""
    file = save(tensors("upper"))
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:end]), separators=(",", ":")).encode()
    num = -(-(len(header) - header_bytes % 256) // 256) * 256 + header_bytes % 256
    file = num.to_bytes(8, "little") + header.ljust(num) + file[end:]
    assert file.startswith(b"\x80")
    http.ok("PUT", "/v1/adapters/begins", content=file, headers=headers("upper"))


def upload(pieces: list[bytes], arrived: asyncio.Queue[None], ends: asyncio.Event, **scope: Any) -> Request:
    """A body in two pieces; the second waits for `ends`."""
    left = [*pieces]

    async def receive() -> Message:
        if len(left) < len(pieces):
            arrived.put_nowait(None)
            await ends.wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "method": "PUT", "client": ("10.0.0.1", 1), **scope}, receive)


def halves(encoded: bool) -> tuple[list[bytes], dict[str, Any]]:
    """A body with more than a half of 1 MB of tensors, the first piece just with their header; its scope."""
    file = save({"a": torch.zeros(150_000)})
    if not encoded:
        head = (b"x-adapter-config", HEADERS["X-Adapter-Config"].encode())
        return [file[:1000], file[1000:]], {"headers": [head], "path_params": {"name": "first"}}
    content = json.dumps(in_base64(file, lora_name="first")).encode()
    start = content.index(b'"serialized_tensors"') + 2000
    return [content[:start], content[start:]], {"headers": [(b"content-type", b"application/json")]}


@pytest.mark.parametrize("encoded", [False, True], ids=["put", "base64"])
def test_a_file_counts_from_its_header_on(engine, tokenizer, monkeypatch, tmp_path, encoded):
    """The second of two bodies is to come later while the first has sent its header alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoints = received.Endpoints(frontend_of(engine, tokenizer, received_mb=1), None)
    call = endpoints.load if encoded else endpoints.put
    pieces, scope = halves(encoded)

    async def run() -> None:
        arrived: asyncio.Queue[None] = asyncio.Queue()
        ends = asyncio.Event()
        first = asyncio.create_task(call(upload(pieces, arrived, ends, **scope)))
        await arrived.get()
        second = asyncio.create_task(call(upload(pieces, arrived, ends, **scope)))
        arrives = asyncio.create_task(arrived.get())
        done, _ = await asyncio.wait({second, arrives}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {second}
        arrives.cancel()
        with pytest.raises(ApiError, match="received_mb=1 with other uploads; retry later") as caught:
            await second
        assert (caught.value.status, bool(caught.value.retry_s)) == (503, True)
        ends.set()
        assert (await first).status_code == 200
        # The first is served: its room is not free before an unload.
        with pytest.raises(ApiError, match="received_mb=1; unload some") as caught:
            await call(upload(pieces, arrived, ends, **scope))
        assert (caught.value.status, caught.value.retry_s) == (413, None)

    asyncio.run(run())
    assert [*engine.adapters] == ["shout", "first"]


def test_a_reload_changes_the_room(engine, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    frontend = frontend_of(engine, tokenizer, received_mb=1)
    endpoints, (pieces, scope) = received.Endpoints(frontend, None), halves(encoded=False)

    async def run() -> None:
        arrived: asyncio.Queue[None] = asyncio.Queue()
        ends = asyncio.Event()
        ends.set()
        assert (await endpoints.put(upload(pieces, arrived, ends, **scope))).status_code == 200
        with pytest.raises(ApiError, match="received_mb=1; unload some"):
            await endpoints.put(upload(pieces, arrived, ends, **scope))
        frontend.limits.change(replace(frontend.config, received_mb=2))
        assert (await endpoints.put(upload(pieces, arrived, ends, **scope))).status_code == 200

    asyncio.run(run())


def test_two_publications_at_once_keep_the_files_of_both(engine, tokenizer, monkeypatch, tmp_path):
    """An instance's answer, under way since before a version was served, lacks the version."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoints = received.Endpoints(frontend_of(engine, tokenizer), None)
    (pieces, scope), list_now = halves(encoded=False), engine.list_adapters

    async def run() -> None:
        asked, answers, ends = asyncio.Event(), asyncio.Event(), asyncio.Event()
        ends.set()

        async def put(name: str) -> None:
            given = scope | {"path_params": {"name": name}}
            assert (await endpoints.put(upload(pieces, asyncio.Queue(), ends, **given))).status_code == 200

        async def list_late() -> Any:
            monkeypatch.setattr(engine, "list_adapters", list_now)
            found = await list_now()
            asked.set()
            await answers.wait()
            return found

        await put("gone")
        await put("policy")
        engine._unload_adapter("gone")
        monkeypatch.setattr(engine, "list_adapters", list_late)
        other = asyncio.create_task(put("critic"))
        await asked.wait()
        await put("policy")
        answers.set()
        await other
        assert [Path(engine.adapters[name].path).is_dir() for name in ("policy", "critic")] == [True, True]
        assert len([*tmp_path.glob("*/*")]) == 2, "other files are removed"

    asyncio.run(run())


def test_nothing_of_unloaded_adapters_is_kept(engine, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoints, (pieces, scope) = (
        received.Endpoints(frontend_of(engine, tokenizer), None),
        halves(encoded=False),
    )

    def num_kept() -> int:
        gc.collect()
        return sum(isinstance(one, _Files) for one in gc.get_objects())

    async def run() -> None:
        arrived: asyncio.Queue[None] = asyncio.Queue()
        ends, before = asyncio.Event(), num_kept()
        ends.set()
        for number in range(3):
            name = {"path_params": {"name": f"run-{number}"}}
            assert (await endpoints.put(upload(pieces, arrived, ends, **scope | name))).status_code == 200
            await endpoints._frontend.client.call("unload_adapter", f"run-{number}")
        assert num_kept() <= before + 1  # a thread holds its last call

    asyncio.run(run())
