# SPDX-License-Identifier: Apache-2.0
"""Attacks that a fuzzer draws: adapters that are refused or read, calls of every operation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.hostile.attacks import GOOD_ADAPTER, load_each
from bench.hostile.hostile_adapters import hostile_configs, lying_headers
from bench.hostile.openapi_calls import draw
from moe_lora.adapters.peft.file_check import opened
from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from tests.serve.conftest import app_of, scripted
from tests.small_tokenizers import characters, wrapped

SHAPE = shape_of(read_config(GOOD_ADAPTER.parents[1] / "model"))


def said_of(folder: Path) -> list[str]:
    """The error or the warnings."""
    try:
        with opened(folder, SHAPE) as found:
            return list(found.match.warnings)
    except AdapterError as error:
        return [f"refused: {error}"]


@pytest.mark.parametrize("write", [lying_headers, hostile_configs])
def test_a_hostile_adapter_is_read_or_refused_in_one_short_line(write: Callable, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_lora.adapters.peft.patterns.MAX_MATCH_S", 0.05)
    said = [line for folder in write(GOOD_ADAPTER, tmp_path, 150) for line in said_of(folder)]
    assert max(map(len, said)) < 2000
    assert not [line for line in said if not line.isprintable()]
    refused = {re.sub(r"[\d'\"/].*", "", line.partition(": ")[2].partition(": ")[2]) for line in said}
    assert len(refused) > 10, "they are refused for few reasons"


@pytest.mark.parametrize("write", [lying_headers, hostile_configs])
def test_a_seed_draws_the_same_adapters_each_time(write: Callable, tmp_path):
    drawn = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folders = list(write(GOOD_ADAPTER, tmp_path / name, 10, seed=1))
        files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
        drawn.append([file.read_bytes() for file in files if file.stat().st_size < 1 << 20])
    here = str(tmp_path / "b").encode()
    assert drawn[0] == [content.replace(here, str(tmp_path / "a").encode()) for content in drawn[1]]


def test_what_was_loaded_is_unloaded(tmp_path):
    asked: list[tuple[bytes, str]] = []

    class Answers:
        def json(self, body, path):
            asked.append((path, body["lora_name"]))
            return b"HTTP/1.1 %d x\r\n\r\n" % (200 if body["lora_name"] == "hostile-1" else 400)

    load_each(Answers(), [tmp_path] * 3)
    load, unload = b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"
    loaded = [(load, f"hostile-{number}") for number in range(3)]
    assert asked == [*loaded[:2], (unload, "hostile-1"), loaded[2]]


@pytest.mark.slow
def test_each_operation_of_the_document_is_called():
    tokenizer = wrapped(characters())
    document = app_of(scripted(tokenizer), tokenizer).openapi()
    paths = ("/v1/completions", "/v1/adapters/{name}/pin", "/v1/adapters")
    document["paths"] = {path: document["paths"][path] for path in paths}
    found: list[bytes] = []
    draw(document, found.append, lambda: len(found) < 45)
    heads = [request.partition(b"\r\n\r\n")[0].decode("latin-1") for request in found]
    called = {tuple(head.split("?")[0].split(" ")[:2]) for head in heads}
    assert {("POST", "/v1/completions"), ("GET", "/v1/adapters")} <= called
    assert any(address.endswith("/pin") for _, address in called)
    assert all("\r\nConnection: close" in head for head in heads)
    bodies = [request.partition(b"\r\n\r\n")[2] for request in found if b"/v1/completions " in request]
    assert any(isinstance(json.loads(body), dict) for body in bodies)
