# SPDX-License-Identifier: Apache-2.0
"""Random schemas over HTTP: every answer of a random model that ends is valid."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.step.test_grammar_masks import random_schema
from tests.patience import PATIENCE_S

from .demo_server import DEMO, demo_server

NUM_CLIENTS = 8


def random_model(folder: Path, seed: int) -> Path:
    """The demo model's shapes and tokenizer with random weights."""
    shutil.copytree(DEMO / "model", folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, one in weights.items():
        scale = one.shape[-1] ** -0.5 if one.dim() > 1 else 1.0
        weights[name] = (scale * torch.randn(one.shape, generator=generator)).to(one.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_definitions(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, at times by a reference, as a property of an object, or among all of some schemas."""
    form = rng.choice(["as it is", "reference", "property", "all of"])
    if form == "reference":
        return {"$ref": "#/$defs/one", "$defs": {"one": schema}}
    if form == "property":
        return {
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/one"}},
            "required": ["one"],
            "additionalProperties": False,
            "$defs": {"one": schema},
        }
    return {"allOf": [schema]} if form == "all of" else schema


def schemas_of(seed: int, num_schemas: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    return (with_definitions(rng, random_schema(rng, depth=3)) for _ in range(num_schemas))


def ends(url: str, schemas: Iterator[dict[str, Any]]) -> Counter[str]:
    """How the answers end: "length", "valid", or the text of a wrong one with its schema."""

    def end(numbered: tuple[int, dict[str, Any]]) -> str:
        number, schema = numbered
        body = {"prompt": "hello", "max_tokens": 200, "seed": number, "temperature": 1.5}
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, (answer.text, schema)
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            return "length"
        try:
            jsonschema.validate(json.loads(choice["text"]), schema)
        except (ValueError, jsonschema.ValidationError):
            return f"{choice['text']!r} under {json.dumps(schema)}"
        return "valid"

    with (
        httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http,
        ThreadPoolExecutor(NUM_CLIENTS) as threads,
    ):
        return Counter(threads.map(end, enumerate(schemas)))


@pytest.mark.parametrize(
    ("seed", "num_schemas"),
    [(0, 10), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in (1, 2))],
)
def test_answers_that_end_are_valid_under_random_schemas(seed, num_schemas, tmp_path):
    model = random_model(tmp_path / "model", seed)
    with demo_server(tmp_path / "log", "--eager", model=model) as server:
        found = ends(server.url, schemas_of(seed, num_schemas))
    assert found["valid"] + found["length"] == num_schemas, sorted(found)
    assert found["length"] <= 0.2 * num_schemas
