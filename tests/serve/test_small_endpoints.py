# SPDX-License-Identifier: Apache-2.0
"""Tokenising, embeddings and the endpoints of hosts and balancers."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_lora.config import EngineConfig
from moe_lora.engine.text.text import Tokenizer, load_tokenizer
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.openai import LATER
from moe_lora.serve.openai.cohere import CohereRequest
from moe_lora.serve.openai.embedding import as_bytes
from moe_lora.serve.server import create_app
from tests.oracle import reference_hidden

from .conftest import as_served, frontend_of, scripted, serving
from .live_server import ServerThread
from .test_limits import limited_server
from .test_limits import refused as num_refused
from .test_prompt_side import MODEL, NAMES, ask, demo, refused  # noqa: F401  (the fixture)

TOKENIZER = load_tokenizer(MODEL)
CHAT = [{"role": "user", "content": "hello"}]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BOTH = {"continue_final_message": True, "add_generation_prompt": True}


@pytest.mark.parametrize("text", ["hello world=", "a" * 20_000])  # the second in the other process
@pytest.mark.parametrize("special", [None, True, False])
def test_texts_become_token_ids_and_texts_again(demo, text, special):  # noqa: F811
    body = {"model": "upper", "prompt": text, "add_special_tokens": special, "return_token_strs": True}
    found = ask(demo, "/tokenize", **body)
    ids = TOKENIZER.encode(text, add_special_tokens=special is not False)
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["max_model_len"] == 256
    assert found["token_strs"] == [TOKENIZER.backend.id_to_token(one) for one in ids]
    back = ask(demo, "/detokenize", model="demo", tokens=ids)["prompt"]
    assert back == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert ask(demo, "/tokenize", prompt="a")["token_strs"] is None


def test_lists_and_sglang_s_form(demo):  # noqa: F811
    texts = ["hello", "a b=", ""]
    lists = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    found = ask(demo, "/v1/tokenize", prompt=texts, add_special_tokens=False)
    assert (found["tokens"], found["count"]) == (lists, list(map(len, lists)))
    assert ask(demo, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []
    whole = ask(demo, "/tokenize", prompt=texts)["tokens"]
    for path in ("/detokenize", "/v1/detokenize"):
        assert ask(demo, path, tokens=whole, skip_special_tokens=True) == {"text": texts}
        assert ask(demo, path, tokens=[], skip_special_tokens=True) == {"text": ""}
    assert ask(demo, "/v1/detokenize", tokens=whole[0]) == {"text": "hello"}
    assert ask(demo, "/detokenize", tokens=whole[0], skip_special_tokens=False)["text"] != "hello"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    plain = ask(demo, "/tokenize", messages=CHAT)["tokens"]
    assert ask(demo, "/tokenize", messages=CHAT, tools=[tool], tool_choice="none")["tokens"] == plain


def test_chats_become_the_token_ids_of_their_prompts(demo):  # noqa: F811
    found = ask(demo, "/tokenize", messages=CHAT)["tokens"]
    answer = ask(demo, "/v1/chat/completions", messages=CHAT, max_tokens=1, return_token_ids=True)
    assert found == answer["prompt_token_ids"]
    assert ask(demo, "/tokenize", messages=CHAT, add_special_tokens=True)["count"] == len(found) + 1


def test_the_tokenizer_describes_itself(demo):  # noqa: F811
    found = demo.get("/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert found["chat_template"]


def version_of(model: str) -> int | None:
    """Of an adapter that nobody has replaced."""
    return None if NAMES[model] is None else 1


@pytest.mark.parametrize("model", NAMES)
def test_embeddings_are_transformers_s_hidden_states(demo, model):  # noqa: F811
    texts = ["hello world=", "abc="]
    ids = [TOKENIZER.encode(one) for one in texts]
    expected = torch.stack([reference_hidden(MODEL, NAMES[model], one)[-1] for one in ids])
    unit = torch.nn.functional.normalize(expected, dim=1)
    for given in (texts, ids):
        answer = ask(demo, "/v1/embeddings", model=model, input=given)
        assert [one["index"] for one in answer["data"]] == [0, 1]
        found = torch.tensor([one["embedding"] for one in answer["data"]])
        torch.testing.assert_close(found, unit, **CLOSE)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["model"] == model
    for given in (texts[0], ids[0]):
        answer = ask(demo, "/v1/embeddings", model=model, input=given, encoding_format="base64")
        values = base64.b64decode(answer["data"][0]["embedding"])
        found = torch.tensor(struct.unpack(f"<{len(values) // 4}f", values))
        torch.testing.assert_close(found, unit[0], **CLOSE)
        assert answer["data"][0].get("adapter_version") == version_of(model)
    pooled = ask(demo, "/pooling", model=model, input=texts)["data"]
    assert [one.get("adapter_version") for one in pooled] == [version_of(model)] * 2
    cohere = ask(demo, "/v2/embed", model=model, texts=texts)["meta"]
    assert cohere.get("adapter_versions") == (version_of(model) and [1, 1])
    torch.testing.assert_close(torch.tensor([one["data"] for one in pooled]), expected, rtol=1e-3, atol=1e-3)


def test_embeddings_of_chats_and_of_shortened_inputs(demo):  # noqa: F811
    chat = ask(demo, "/v1/embeddings", messages=CHAT, add_generation_prompt=True)
    tokens = ask(demo, "/tokenize", messages=CHAT)["tokens"]
    assert chat["data"] == ask(demo, "/v1/embeddings", input=tokens)["data"]
    long = ask(demo, "/v1/embeddings", input="hello " * 300, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 256
    short = ask(demo, "/v1/embeddings", input=tokens, truncate_prompt_tokens=2)
    assert short["data"] == ask(demo, "/v1/embeddings", input=tokens[-2:])["data"]


def test_cohere_s_interface_has_the_same_vectors_by_type(demo):  # noqa: F811
    texts = ["hello world=", "abc="]
    data = ask(demo, "/v1/embeddings", input=texts)["data"]
    expected = [one["embedding"] for one in data]
    kinds = ["float", "base64", "ubinary", "binary"]
    answer = ask(demo, "/v2/embed", texts=texts, embedding_types=kinds)
    found = answer["embeddings"]
    assert answer["texts"] == texts
    assert found["float"] == expected
    assert ask(demo, "/v2/embed", texts=texts)["embeddings"] == {"float": expected}
    for row, values in enumerate(expected):
        raw = base64.b64decode(found["base64"][row])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(values)
        bits = [bit == "1" for byte in found["ubinary"][row] for bit in f"{byte:08b}"]
        assert bits == [value >= 0 for value in values]
        assert [one + 128 for one in found["binary"][row]] == found["ubinary"][row]
    num_tokens = sum(len(TOKENIZER.encode(one)) for one in texts)
    assert answer["meta"]["billed_units"]["input_tokens"] == num_tokens


def test_an_input_type_is_the_model_s_prefix(tmp_path):
    prompts = {"query": "Query: ", "document": "", "odd": 1}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    tokenizer = Tokenizer(TOKENIZER.backend, folder=tmp_path)
    for name, expected in (("query", ["Query: a"]), ("document", ["a"])):
        body = CohereRequest.model_validate({"texts": ["a"], "input_type": name})
        assert (body.texts(tokenizer), body.given) == (expected, ["a"])
    for wrong, texts, message in (
        ("other", ["a"], "Unsupported input_type 'other': send one of document, odd, query"),
        ("odd", ["a"], "Unsupported input_type 'odd'"),
        ("query", [[5]], "input_type needs texts"),
    ):
        with pytest.raises(ApiError, match=message):
            CohereRequest.model_validate({"texts": texts, "input_type": wrong}).texts(tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"task_instructions": {"query": "Find "}}))
    assert CohereRequest.model_validate({"texts": ["a"], "input_type": "query"}).texts(tokenizer) == [
        "Find a"
    ]


@pytest.mark.parametrize(("truncate", "kept"), [("START", -2), ("END", 2)])
def test_cohere_s_interface_shortens_at_the_named_side(demo, truncate, kept):  # noqa: F811
    tokens = ask(demo, "/tokenize", prompt="hello")["tokens"]
    part = tokens[kept:] if kept < 0 else tokens[:kept]
    expected = [one["embedding"] for one in ask(demo, "/v1/embeddings", input=part)["data"]]
    body = {"texts": ["hello"], "truncate": truncate, "max_tokens": 2}
    assert ask(demo, "/v2/embed", **body)["embeddings"]["float"] == expected
    long = ["hello " * 300]
    assert ask(demo, "/v2/embed", texts=long)["meta"]["billed_units"]["input_tokens"] == 256
    assert "maximum context length" in refused(demo, "/v2/embed", texts=long, truncate="NONE")["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/invocations"])
def test_conversations_are_embedded_from_messages_or_input(demo, path):  # noqa: F811
    other = [{"role": "user", "content": "abc"}]
    plain = {"encoding_format": "float"}
    expected = [ask(demo, "/v1/embeddings", messages=one, **plain)["data"][0] for one in (CHAT, other)]
    for body in ({"messages": CHAT}, {"input": CHAT}, {"input": [CHAT]}):
        assert ask(demo, path, **body, **plain)["data"] == [expected[0]]
    for name in ("messages", "input"):
        found = ask(demo, path, **{name: [CHAT, other]}, **plain)["data"]
        assert [one["embedding"] for one in found] == [one["embedding"] for one in expected]


TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", TYPES)
def test_vectors_become_bytes_as_torch_casts_them(name):
    spread = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    steps = torch.arange(-1024, 1024) / 512  # ties
    edges = torch.tensor([0.0, -0.0, 448, 464, 1e9, -1e9, 61440, 57344, 2**-9, 2**-10, 2**-16, 2**-17])
    values = torch.cat([spread * spread.roll(1).mul(4).exp(), steps, edges])
    expected = values.to(TYPES[name]).view(torch.uint8)
    width = TYPES[name].itemsize
    for endianness in ("native", "little", "big"):
        found = as_bytes(values.numpy(), name, endianness)
        swapped = expected.view(-1, width).flip(1) if endianness == "big" else expected
        assert found == swapped.numpy().tobytes()


@pytest.mark.parametrize("endianness", ["little", "big"])
@pytest.mark.parametrize("name", TYPES)
def test_answers_of_bytes_have_the_vectors_of_base64(demo, name, endianness):  # noqa: F811
    body = {"input": ["hello", "abc"], "embed_dtype": name, "endianness": endianness}
    data = ask(demo, "/v1/embeddings", **body, encoding_format="base64")["data"]
    expected = [base64.b64decode(one["embedding"]) for one in data]
    answer = demo.post("/v1/embeddings", {**body, "encoding_format": "bytes"})
    places = json.loads(answer.headers["metadata"])["data"]
    assert [answer.content[one["start"] : one["end"]] for one in places] == expected
    assert places[1]["index"] == 1
    assert (places[1]["embed_dtype"], places[1]["endianness"]) == (name, endianness)
    assert places[1]["shape"] == [len(expected[1]) // TYPES[name].itemsize]
    answer = demo.post("/v1/embeddings", {**body, "encoding_format": "bytes_only"})
    assert answer.content == b"".join(expected)
    assert "metadata" not in answer.headers


def test_a_model_of_several_widths_shortens_its_embeddings(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [4, 8]}')
    engine = scripted(tokenizer, hidden=np.arange(1, 17, dtype="<f4").tobytes())
    frontend = frontend_of(engine, tokenizer)
    frontend.cluster = replace(frontend.cluster, engine=EngineConfig(model_dir=str(tmp_path)))
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        [short] = ask(served, "/v1/embeddings", input="hello", dimensions=4)["data"]
        vector = torch.nn.functional.normalize(torch.arange(1.0, 5.0), dim=0)
        torch.testing.assert_close(torch.tensor(short["embedding"]), vector)
        assert "allowed are 4, 8" in refused(served, "/v1/embeddings", input="a", dimensions=5)["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt or messages must be given, and not both"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt or messages must be given, and not both"),
        ("/tokenize", {"prompt": [5]}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 2049}, "at most 2048"),
        ("/tokenize", {"messages": [{"role": 1}]}, "messages"),
        ("/tokenize", {"messages": CHAT, **BOTH}, "Cannot set both"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [128]}, "token id 128 is out of vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[5], 6]}, "tokens"),
        ("/v1/detokenize", {"tokens": [[5], [128]]}, "token id 128 is out of vocabulary"),
        ("/v1/embeddings", {"input": []}, "input is empty"),
        ("/v2/embed", {"texts": []}, "texts is empty"),
        ("/v2/embed", {"texts": ["a"], "images": ["b"]}, "images is not supported"),
        ("/v2/embed", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ("/v2/embed", {"texts": ["a"], "input_type": "query"}, "Unsupported input_type 'query'"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 3}, "leave output_dimension out"),
        ("/v2/embed", {"texts": ["a"], "dimension": 256}, "did you mean output_dimension"),
        ("/v2/embed", {"texts": ["a" * 300], "truncate": "NONE"}, "shorten texts"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input is empty"),
        ("/v1/embeddings", {"input": [[128]]}, "token id 128"),
        ("/v1/embeddings", {"input": "a" * 300}, "maximum context length is 256"),
        ("/v1/embeddings", {"input": [[1]] * 2049}, "at most 2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions=3 is not a width"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding"),
        ("/v1/embeddings", {"input": [CHAT[0], "a"]}, "messages"),
        ("/v1/embeddings", {"input": [CHAT, [5]]}, "messages"),
        ("/v1/embeddings", {"input": [CHAT], "messages": CHAT}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 257, "encoding_format": "bytes"}, "bytes_only"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 300}, "truncate_prompt_tokens"),
        ("/pooling", {"input": "a", "task": "classify"}, "Unsupported task: 'classify'"),
        ("/invocations", {"model": "demo"}, "none of messages, prompt, input"),
        ("/invocations", [], "must be a JSON object"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused(demo, path, body, message):  # noqa: F811
    answer = demo.post(path, body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "a" * 21}, "prompt"),
        ("/tokenize", {"prompt": "a" * 20_000}, "prompt"),
        ("/detokenize", {"tokens": [5] * 21}, "tokens"),
        ("/v1/embeddings", {"input": [[5] * 7] * 3}, "input"),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": "hello " * 20}], "model": "base"},
            "messages",
        ),
    ],
)
def test_requests_have_a_limit_of_tokens(tokenizer, path, body, field):
    with limited_server(tokenizer, max_request_tokens=20) as (served, _):
        answer = served.post(path, body)
        assert answer.status_code == 400
        assert "more than the 20 of one request" in answer.text
        assert field in answer.text
        assert num_refused(served, "request_tokens") == 1


def test_embeddings_have_a_timeout_and_name_ignored_fields(tokenizer):
    body = {"input": "hello", "zz": 1}
    with serving(scripted(tokenizer, step_s=5.0), tokenizer) as served:
        for header, status in (("0.1", 408), ("soon", 400)):
            headers = {"X-Request-Timeout": header}
            answer = served.http.post("/v1/embeddings", json={**body, "timeout": 60}, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_ignored_fields_are_named(demo, path, body):  # noqa: F811
    answer = demo.post(path, {**body, "zz": 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "zz"
    assert "x-ignored-fields" not in demo.post(path, body).headers


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
def test_unknown_models_are_404(demo, path):  # noqa: F811
    answer = demo.post(path, {"model": "none", "prompt" if path == "/tokenize" else "input": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello=", "max_tokens": 3, "temperature": 0}),
        ("/v1/completions", {"prompt": "hello=" * 3000, "max_tokens": 3, "truncate_prompt_tokens": 9}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "temperature": 0}),
        ("/v1/embeddings", {"input": "hello="}),
    ],
)
def test_invocations_answer_as_the_body_s_endpoint(demo, path, body):  # noqa: F811
    own, found = ask(demo, path, model="upper", **body), ask(demo, "/invocations", model="upper", **body)
    assert found.keys() == own.keys()
    key = "data" if path == "/v1/embeddings" else "choices"
    if "temperature" in body or key == "data":
        assert found[key] == own[key]


def test_invocations_stream_and_pass_errors_on(demo):  # noqa: F811
    answer = demo.post("/invocations", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert refused(demo, "/invocations", prompt="a", max_tokens=-1)["param"] == "max_tokens"


def test_hosts_and_balancers_get_their_endpoints(demo):  # noqa: F811
    assert demo.get("/ping").status_code == 200
    assert demo.post("/ping", {}).status_code == 200
    assert demo.get("/load").json() == {"server_load": 0}
    assert "version" in demo.get("/version").json()


def test_the_modules_are_imported_by_their_first_request():
    places = sorted({module for _, module, _, _ in LATER})
    code = f"import sys, moe_lora.serve.server; print([one for one in {places} if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings", "/pooling"])
def test_a_form_of_another_site_is_refused(demo, path):  # noqa: F811
    answer = demo.http.post(path, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type" in answer.json()["error"]["message"]
