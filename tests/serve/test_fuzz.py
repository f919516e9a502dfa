# SPDX-License-Identifier: Apache-2.0
"""No input makes the server answer 500: cases from the OpenAPI document, and mangled bodies."""

from __future__ import annotations

import json
import tempfile

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from moe_lora.adapters.registry.registry import Registry
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.serve.anthropic.request import MessagesBody
from moe_lora.serve.openai.responses.request import ResponsesBody
from tests.adapters.peft_folders import BASE
from tests.patience import PATIENCE_S
from tests.small_tokenizers import characters, wrapped

from .conftest import app_of, scripted

TOKENIZER = wrapped(characters())
FOLDER = tempfile.TemporaryDirectory()
REGISTRY = ServedRegistry(Registry(FOLDER.name), BASE)
APP = app_of(scripted(TOKENIZER), TOKENIZER, registry=REGISTRY)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
LIMITED = settings(deadline=None, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just("\ud800"),
    st.just(10**400),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
VALID = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3, "model": "base"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "y"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/registry/adapters": {"lora_name": "x", "lora_path": "y", "owner": "me"},
}
FIELDS = sorted(
    {
        name
        for schema in APP.openapi()["components"]["schemas"].values()
        for name in schema.get("properties", {})
    }
    | {*ResponsesBody.model_fields, *MessagesBody.model_fields}
    | {"echo", "logit_bias", "tools", "response_format", "user", "presence_penalty", "repetition_penalty"}
)


def check(response):
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()
        fields = {"message", "type"} if error.get("type") == "error" else {"message", "type", "param", "code"}
        assert set(error["error"]) == fields


@SCHEMA.parametrize()
@settings(LIMITED, max_examples=2, phases=[Phase.generate])
def test_cases_from_the_openapi_document(case):
    case.call_and_validate(checks=[not_a_server_error], timeout=PATIENCE_S)


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(LIMITED, max_examples=20)
def test_more_cases_from_the_openapi_document(case):
    case.call_and_validate(checks=[not_a_server_error], timeout=PATIENCE_S)


changed = given(
    path=st.sampled_from(sorted(VALID)),
    changes=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3),
)
raw = given(
    path=st.sampled_from(sorted(VALID)),
    body=st.binary(max_size=60) | anything.map(lambda v: json.dumps(v).encode()),
)


@settings(LIMITED, max_examples=40)
@changed
def test_valid_bodies_with_some_fields_replaced(any_server, path, changes):
    check(any_server.post(path, {**VALID[path], **changes}))


@pytest.mark.slow
@settings(LIMITED, max_examples=300)
@changed
def test_more_valid_bodies_with_some_fields_replaced(any_server, path, changes):
    check(any_server.post(path, {**VALID[path], **changes}))


@settings(LIMITED, max_examples=20)
@raw
def test_any_bytes_as_a_body(any_server, path, body):
    check(any_server.post_raw(path, body))


@pytest.mark.slow
@settings(LIMITED, max_examples=160)
@raw
def test_more_bytes_as_a_body(any_server, path, body):
    check(any_server.post_raw(path, body))
