# SPDX-License-Identifier: Apache-2.0
"""Fields of the generating endpoints, honoured and refused, from the OpenAPI document."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI

from moe_lora.serve.openai.endpoints import generating_router

from .markdown import table

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def served() -> str:
    """The table of today's endpoints."""
    app, nobody = FastAPI(), cast("Any", SimpleNamespace(prepare=None))
    app.include_router(generating_router(nobody, nobody))
    return fields_of(app.openapi())


def fields_of(document: Mapping[str, Any]) -> str:
    """The table of a document."""
    first, second = (_schema(document, path) for path in (COMPLETIONS, CHATS))
    own = [set(one["properties"]) for one in (first, second)]
    refused = [one["x-refused"] for one in (first, second)]
    ignored = [set(one["x-ignored"]) for one in (first, second)]
    rows = [
        ("both", _names(own[0] & own[1])),
        ("completions", _names(own[0] - own[1])),
        ("chats", _names(own[1] - own[0])),
        *_refused("400 in both", {name: refused[0][name] for name in refused[0] if name in refused[1]}),
        ("400 in completions, unless `null` or as shown", _with_values(refused[0], refused[1])),
        ("without an effect", _names(ignored[0] & ignored[1])),
    ]
    return table(("", "fields"), rows)


def _schema(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found: dict[str, Any] = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[-1]]
    return found


def _refused(what: str, fields: Mapping[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """A row for each list of neutral values."""
    by_values = defaultdict[str, set[str]](set)
    for name, values in fields.items():
        by_values[" or ".join(f"`{json.dumps(one)}`" for one in values)].add(name)
    for neutral, names in sorted(by_values.items()):
        yield f"{what}, unless {neutral}", _names(names)


def _with_values(fields: Mapping[str, list[Any]], others: Mapping[str, list[Any]]) -> str:
    """Fields that the others lack, with their neutral values but null."""
    shown = {
        name: ", ".join(f"`{json.dumps(one)}`" for one in values if one is not None)
        for name, values in sorted(fields.items())
        if name not in others
    }
    return ", ".join(f"`{name}` ({texts})" if texts else f"`{name}`" for name, texts in shown.items())


def _names(fields: Iterable[str]) -> str:
    return f"`{' '.join(sorted(fields))}`"
