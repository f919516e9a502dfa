# SPDX-License-Identifier: Apache-2.0
"""Responses in the background: their states, cancellation, bounds and owners; the raw prompt and answer."""

from __future__ import annotations

import sys

import httpx
import openai
import pytest

from moe_lora.serve.api_keys import add_key
from moe_lora.serve.openai.responses import background
from tests.patience import PATIENCE_S

from .conftest import app_of, scripted, serving
from .live_server import ServerThread, wait_until
from .test_access import rights
from .test_responses import respond, shape
from .test_tools import saying

PATH, BODY = "/v1/responses", {"input": "hello", "background": True}


def status(server, response_id):
    return server.get(f"{PATH}/{response_id}").json()["status"]


def started(server, engine, num_tokens, **body):
    """The id of a response that hangs after these tokens."""
    before = engine.num_tokens
    engine.hang_after = before + num_tokens
    response_id = server.post(PATH, {**BODY, "ignore_eos": True, **body}).json()["id"]
    wait_until(lambda: engine.num_tokens == before + num_tokens and engine.running, "the response runs")
    return response_id


def test_a_response_is_queued_and_ends_as_the_whole_answer():
    with saying("hello world") as (client, _):
        whole = shape(respond(client))
        queued = respond(client, background=True)
        assert (queued.status, queued.output, queued.store, queued.background) == ("queued", [], True, True)
        wait_until(lambda: client.responses.retrieve(queued.id).status == "completed", "the response ends")
        ended = client.responses.retrieve(queued.id)
        assert shape(ended) == {**whole, "background": True}
        more = respond(client, input="more", previous_response_id=queued.id)
        assert more.status == "completed"
        assert client.responses.cancel(queued.id) == ended  # an ended response stays
        cut = respond(client, background=True, max_output_tokens=2)
        wait_until(lambda: client.responses.retrieve(cut.id).status == "incomplete", "the response ends")


@pytest.mark.parametrize(("num_tokens", "before"), [(0, "queued"), (2, "in_progress")])
def test_a_cancelled_response_stays_cancelled(server, engine, num_tokens, before):
    response_id = started(server, engine, num_tokens)
    assert status(server, response_id) == before
    refused = server.post(PATH, {"input": "more", "previous_response_id": response_id})
    assert (refused.status_code, before in refused.text) == (400, True)
    cancelled = server.post(f"{PATH}/{response_id}/cancel", {}).json()
    assert (cancelled["status"], cancelled["id"], cancelled["store"]) == ("cancelled", response_id, True)
    assert len(engine.aborted) == 1
    assert not engine.running
    assert server.get(f"{PATH}/{response_id}").json() == cancelled
    assert server.post(f"{PATH}/{response_id}/cancel", {}).json() == cancelled
    refused = server.post(PATH, {"input": "more", "previous_response_id": response_id})
    assert (refused.status_code, "is cancelled" in refused.text) == (400, True)


def test_a_deleted_response_ends(server, engine):
    response_id = started(server, engine, 1)
    assert server.http.delete(f"{PATH}/{response_id}").json()["deleted"] is True
    assert not engine.running
    assert server.get(f"{PATH}/{response_id}").status_code == 404


def test_an_error_and_an_abort_are_states(tokenizer):
    engine = scripted(tokenizer, fail_after=2, cuts=[1, 90])
    with serving(engine, tokenizer) as served:
        for found in ("cancelled", "failed"):
            response_id = served.post(PATH, BODY).json()["id"]
            wait_until(lambda one=response_id, end=found: status(served, one) == end, f"the response {found}")
        error = served.get(f"{PATH}/{response_id}").json()["error"]
        assert (error["code"], "has ended" in error["message"]) == ("server_error", True)
        late = served.post(PATH, {**BODY, "model": "nobody"}).json()
        wait_until(lambda: status(served, late["id"]) == "failed", "the response fails")


def test_running_responses_are_bounded(server, engine, monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING_PER_CLIENT", 1)
    response_id = started(server, engine, 1)
    refused = server.post(PATH, BODY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "background")
    assert refused.headers["retry-after"]
    server.post(f"{PATH}/{response_id}/cancel", {})
    engine.hang_after = None
    assert server.post(PATH, BODY).status_code == 200


def test_a_running_response_belongs_to_its_key(engine, tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    keys = [add_key(file, rights("acme")) for _ in range(2)]
    engine.hang_after = 1
    with ServerThread(app_of(engine, tokenizer, api_keys=str(file))) as thread:
        own, other = (
            httpx.Client(base_url=thread.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)
            for key in keys
        )
        with own, other:
            path = f"{PATH}/{own.post(PATH, json=BODY).json()['id']}"
            assert other.get(path).status_code == 404
            assert other.post(f"{path}/cancel").status_code == 404
            assert other.delete(path).status_code == 404
            assert own.post(f"{path}/cancel").json()["status"] == "cancelled"


def test_the_prompt_and_the_answer_as_tokens():
    with saying("hello") as (client, engine):
        found = respond(client, extra_body={"enable_response_messages": True}).to_dict()
        [prompt], [answer] = found["input_messages"], found["output_messages"]
        assert prompt["type"] == answer["type"] == "raw_message_tokens"
        assert tuple(prompt["tokens"]) == engine.requests[-1].prompt_token_ids
        assert prompt["message"] == engine.prompts()[-1]
        assert answer["tokens"] == list(engine.answers[None])
        assert answer["message"].startswith("hello")
        assert "input_messages" not in respond(client).to_dict()


@pytest.mark.parametrize("name", ["background", "enable_response_messages"])
def test_rendered_prompts_have_no_such_answer(server, name):
    refused = server.post("/v1/responses/render", {"input": "hello", name: True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_plain_response_enters_no_file_of_the_others(server, monkeypatch):
    for name in ("background", "raw_messages"):
        monkeypatch.delitem(sys.modules, f"moe_lora.serve.openai.responses.{name}", raising=False)
    assert server.post(PATH, {"input": "hello"}).status_code == 200
    with (
        pytest.raises(openai.NotFoundError),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        client.responses.retrieve("resp_1")
    loaded = [name for name in sys.modules if name.endswith(("responses.background", "raw_messages"))]
    assert loaded == []
