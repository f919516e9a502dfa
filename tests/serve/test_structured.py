# SPDX-License-Identifier: Apache-2.0
"""Grammars of requests over HTTP: each field of vLLM, OpenAI and SGLang; wrong ones are 400 by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import pytest

from .live_server import Served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
JSON_FIELDS = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": CLOSED, "strict": True},
        }
    },
    {"structured_outputs": {"json": CLOSED}},
    {"structured_outputs": {"json": json.dumps(CLOSED)}},
    {"guided_json": CLOSED},
    {"json_schema": json.dumps(CLOSED)},
]
TEXT_FIELDS = [
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_choice": ["red", "blue"]}, "red|blue"),
    ({"guided_grammar": 'start: "x" | "yy"'}, "x|yy"),
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"ebnf": 'root ::= "x" | "yy"'}, "x|yy"),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[ab]{3}"}}},
        "[ab]{3}",
    ),
]
PATHS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 90},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 90},
}
BOMB = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": "^a{1,50}$"} for n in range(30000)},
}


@pytest.fixture(scope="module")
def served(demo) -> Iterator[Served]:
    with Served.at(demo.url, "demo", "upper", max_model_len=256, vocab_size=128) as found:
        yield found


def texts(server, path, **fields):
    answer = server.post(path, {**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [(one.get("text", one.get("message", {}).get("content")), one["finish_reason"]) for one in choices]


@pytest.mark.parametrize("path", PATHS)
def test_each_field_of_a_schema_holds(served, path):
    for number, field in enumerate(JSON_FIELDS):
        for text, reason in texts(served, path, **field, n=2, seed=number, temperature=1.5):
            assert reason == "length" or set(json.loads(text)) == {"a"}
    [(text, reason)] = texts(served, path, response_format={"type": "json_object"}, seed=1)
    assert reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(("field", "pattern"), TEXT_FIELDS)
def test_each_field_of_a_text_holds(served, field, pattern):
    for path in PATHS:
        [(text, reason)] = texts(served, path, **field, temperature=1.5)
        assert reason == "stop"
        assert re.fullmatch(pattern, text)


def test_a_stream_has_the_same_text(served):
    body = {**PATHS["/v1/completions"], "guided_regex": "[a-z]{9}", "seed": 3, "temperature": 2.0}
    [(whole, _)] = texts(served, "/v1/completions", **body)
    streamed = served.post("/v1/completions", {**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"guided_json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}},
            "uniqueItems",
        ),
        ({"guided_json": {"type": "strang"}}, "strang"),
        ({"guided_json": {"$ref": "#/nothing"}}, "nothing"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(" * 5000 + ")" * 5000}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        ({"ebnf": "root ::= nothing"}, "nothing"),
        ({"ebnf": "root ::= " + "(" * 4000}, "ebnf"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"jsonn": {}}}, "jsonn"),
        ({"structured_outputs": {"regex": 5}}, "regex"),
        ({"structured_outputs": {"choice": [5]}}, "choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "json and regex both give"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"guided_json": BOMB}, "guided_json"),
        ({"guided_json": json.dumps(BOMB)}, "guided_json"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_wrong_grammars_are_400_by_name(served, fields, named):
    for path in PATHS:
        answer = served.post(path, {**PATHS[path], **fields})
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert named in message
        assert len(message) < 1000


def test_neutral_values_ask_for_nothing(any_server):
    neutral = {
        "response_format": {"type": "text"},
        "guided_json": None,
        "guided_choice": [],
        "guided_regex": "",
    }
    body = {"prompt": "hello", "max_tokens": 2, **neutral, "structured_outputs": None, "ebnf": ""}
    assert any_server.post("/v1/completions", body).status_code == 200


def test_others_go_on_while_bombs_are_refused(served):
    nested = "((((a{1,90}){1,90}){1,90}){1,90}){1,90}b" * 9
    stop = threading.Event()

    def attack() -> None:
        while not stop.is_set():
            served.post(
                "/v1/completions", {**PATHS["/v1/completions"], "guided_regex": nested, "max_tokens": 5}
            )

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    for one in attackers:
        one.start()
    answers = [texts(served, "/v1/completions", max_tokens=4) for _ in range(20)]
    stop.set()
    for one in attackers:
        one.join()
    assert all(answers)


ENDLESS = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), [("guided_choice", ["日本"]), ("response_format", ENDLESS)])
def test_a_grammar_without_an_answer_is_the_clients_error(served, path, name, value):
    answer = served.post(path, {**PATHS[path], name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{name}: the engine can't run this request: no token can follow")
    assert error["param"] == name


OF_OTHERS = [
    (
        "/v1/responses",
        {"input": "hello", "text": {"format": {**ENDLESS["json_schema"], "type": "json_schema"}}},
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), OF_OTHERS, ids=["responses", "messages"])
def test_an_engines_error_before_a_stream_names_the_clients_field(served, path, body):
    whole, streamed = (served.post(path, {**body, "stream": stream}) for stream in (False, True))
    assert (whole.status_code, streamed.status_code) == (400, 400)
    assert "format: the engine can't run" in whole.json()["error"]["message"]
    assert streamed.json()["error"] == whole.json()["error"]


def test_a_streams_missing_adapter_has_the_clients_name_of_the_field(served):
    body = {"text": "hello", "lora_path": "nope", "stream": True}
    assert served.post("/generate", body).json()["error"]["param"] == "lora_path"


def test_grammars_that_explode_are_refused_within_limits(served):
    schema = {"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(30)]}
    lark = "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}b/" for n in range(30))
    for fields in (
        {"guided_json": schema},
        {"guided_json": {**schema, "title": "x" * 20000}},
        {"guided_grammar": lark},
    ):
        answer = served.post("/v1/completions", {**PATHS["/v1/completions"], **fields})
        assert answer.status_code == 400, answer.text
        assert "processor time" in answer.json()["error"]["message"]
    assert texts(served, "/v1/completions", guided_choice=["red"]) == [("red", "stop")]
