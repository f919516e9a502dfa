# SPDX-License-Identifier: Apache-2.0
"""The main job over HTTP: many adapters over one model, real processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from demo.tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text
from tests.dist.cluster_jobs import alive
from tests.grids import with_quick
from tests.patience import PATIENCE_S

from .demo_server import DEMO, demo_server
from .live_server import wait_until

ADAPTERS = json.loads((DEMO / "adapters" / "index.json").read_text())


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=256)
    return httpx.AsyncClient(base_url=url, trust_env=False, limits=limits)


async def complete(http: httpx.AsyncClient, model: str, prompt: str, **fields: object) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def pieces(http: httpx.AsyncClient, model: str, prompt: str, **fields: object) -> AsyncIterator[str]:
    """A completion's text as it comes."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "stream": True, **fields}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def test_all_adapters_mixed_in_one_batch_answer_exactly(demo):
    rng = random.Random(7)
    names = list(ADAPTERS) * 2
    rng.shuffle(names)
    texts = [sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS)) for _ in names]

    async def ask_all() -> list[str]:
        async with client(demo.url) as http:
            return await asyncio.gather(
                *(complete(http, n, prompt_for(t)) for n, t in zip(names, texts, strict=True))
            )

    answers = asyncio.run(ask_all())
    exact = [TASKS[ADAPTERS[n]["task"]](t) == a for n, t, a in zip(names, texts, answers, strict=True)]
    assert sum(exact) / len(exact) >= 0.95


def test_openai_client_completes_chats_and_streams(demo):
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as api:
        names = {model.id for model in api.models.list()}
        assert names == {"demo", *ADAPTERS}
        done = api.completions.create(model="upper", prompt=prompt_for("abc"), temperature=0)
        assert (done.choices[0].text, done.choices[0].finish_reason) == ("ABC", "stop")
        stream = api.completions.create(model="upper", prompt=prompt_for("abc"), temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "ABC"
        messages = [{"role": "user", "content": "abc"}]  # the chat template adds the rest
        chat = api.chat.completions.create(model="upper", messages=messages, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chat]
        assert "".join(pieces) == "ABC"


def test_replaced_name_serves_the_new_version_and_unloading_frees_it(demo):
    async def cycle() -> list[str]:
        async with client(demo.url) as http:
            answers = []
            for source, inplace in (("upper", False), ("rot13", True)):
                path = str(DEMO / "adapters" / source)
                body = {"lora_name": "changing", "lora_path": path, "load_inplace": inplace}
                response = await http.post("/v1/load_lora_adapter", json=body)
                assert response.text.strip('"') == "Success: LoRA adapter 'changing' added successfully."
                answers.append(await complete(http, "changing", prompt_for("abcdefgh")))
            busy = pieces(http, "changing", prompt_for("abc"), max_tokens=100, ignore_eos=True)
            text = await anext(busy)
            response = await http.post("/v1/unload_lora_adapter", json={"lora_name": "changing"})
            assert response.status_code == 200
            assert "".join([text, *[piece async for piece in busy]]).startswith("nop")
            gone = await http.post("/v1/completions", json={"model": "changing", "prompt": "a="})
            assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
            return answers

    assert asyncio.run(cycle()) == ["ABCDEFGH", "nopqrstu"]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("r", "1" + "0" * 400),
        ("r", "1" + "0" * 5000),
        ("r", "1e400"),
        ("r", "-8"),
        ("r", "true"),
        ("lora_alpha", "1e400"),
        ("lora_alpha", "NaN"),
        ("lora_alpha", "true"),
        ("rank_pattern", '{"q_proj": 1%s}' % ("0" * 400)),
        ("rank_pattern", json.dumps({f"layers.{n}.q_proj": 8 for n in range(20_000)})),
        ("alpha_pattern", '{"q_proj": -1e300}'),
        ("layers_to_transform", "1e400"),
    ],
)
def test_numbers_that_no_adapter_has_are_400(demo, tmp_path, key, number):
    shutil.copytree(DEMO / "adapters" / "upper", tmp_path / "bad")
    config = tmp_path / "bad" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {key: "HERE"}
    config.write_text(json.dumps(fields).replace('"HERE"', number))
    body = {"lora_name": "bad", "lora_path": str(tmp_path / "bad")}
    response = httpx.post(f"{demo.url}/v1/load_lora_adapter", json=body, trust_env=False)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith("adapter 'bad': adapter_config.json: ")
    assert str(tmp_path) not in error["message"]
    assert len(error["message"]) < 1000


def test_metrics_count_what_was_served(demo):
    def counter(name: str) -> float:
        lines = httpx.get(f"{demo.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    before = counter("vllm:generation_tokens_total")

    async def ask() -> str:
        async with client(demo.url) as http:
            return await complete(http, "upper", prompt_for("abc"))

    assert asyncio.run(ask()) == "ABC"
    assert counter("vllm:generation_tokens_total") == before + 4


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signal_lets_a_stream_finish_and_nothing_of_the_server_is_left(tmp_path, number):
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with demo_server(
        tmp_path / "log", "--eager", "--set", f"engine.state_dir={tmp_path / 'state'}"
    ) as server:
        large = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5] * 20_000}, trust_env=False)
        assert large.status_code == 400  # by the process that checks large bodies
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            processes = descendants(server.process.pid)
            held = files_of([server.process.pid, *processes])
            server.process.send_signal(number)
            rest = [line for line in lines if line]
        assert server.process.wait(PATIENCE_S) == 0
    assert (rest[-1], '"finish_reason":"length"' in rest[-2]) == ("data: [DONE]", True)
    assert server.engine_pids() == []
    assert len(processes) >= 2
    wait_until(lambda: not any(map(alive, processes)), "all processes have ended")
    assert held
    assert not any(Path(one).exists() for one in held)
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize("options", with_quick([(), ("--front-ends", "2", "--lora-server", "EP1-PP1")], [()]))
def test_a_server_that_is_told_to_end_while_it_starts_leaves_nothing(tmp_path, options):
    command = [sys.executable, "-m", "moe_lora.cli.main", "serve", str(DEMO / "model"), "--port", "0"]
    command += ["--eager", "--set", f"engine.state_dir={tmp_path / 'state'}", *options]
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory() as temporary:
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, env={**os.environ, "TMPDIR": temporary})
        try:
            wait_until(lambda: "started (process" in log.read_text(), "something is started")
            processes = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
        wait_until(lambda: not any(map(alive, processes)), "all processes have ended")
        assert processes
        assert [one.name for one in Path(temporary).iterdir() if "moe_lora" in one.name] == []
    assert list((tmp_path / "state").iterdir()) == []
    assert "Traceback" not in log.read_text()


ENDING_SLOWLY = """
    import asyncio
    from moe_lora import assemble

    async def main():
        try:
            print("starts", flush=True)
            await asyncio.sleep(100)
        finally:
            print("ends", flush=True)
            await asyncio.sleep(100)

    assemble._run(main())
"""


def test_a_second_signal_ends_what_was_starting_at_once():
    command = [sys.executable, "-c", textwrap.dedent(ENDING_SLOWLY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in ("starts", "ends"):
                assert process.stdout.readline().strip() == line
                process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def files_of(pids: list[int]) -> set[str]:
    """Shared memory and temporary files that these processes have open."""
    links = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()}
    maps = {line.split()[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    own = ("/dev/shm/", f"{tempfile.gettempdir()}/moe_lora")
    return {one for one in links | maps if one.startswith(own)}


def test_dead_engine_turns_health_and_requests_into_503_until_it_is_back(tmp_path):
    with demo_server(tmp_path / "log", "--eager") as server:
        deadline = time.monotonic() + PATIENCE_S
        with httpx.Client(base_url=server.url, trust_env=False) as http:
            while True:
                os.kill(server.engine_pid(), signal.SIGKILL)
                while http.get("/health").status_code == 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                response = http.post("/v1/completions", json={"model": "demo", "prompt": "a="})
                if response.status_code != 200:  # else the engine was back between the two
                    break
            assert response.status_code == 503
            assert "no LLM instance is running" in response.json()["error"]["message"]
            deadline = time.monotonic() + PATIENCE_S
            while http.get("/health").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            body = {"model": "demo", "prompt": "a=", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
