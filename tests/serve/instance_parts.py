# SPDX-License-Identifier: Apache-2.0
"""Two instances behind one server, and streams over their adapters."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from demo.tasks import prompt_for
from moe_lora.cli.main import main
from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server, few_adapters

ADAPTERS = json.loads((DEMO / "adapters" / "index.json").read_text())
# In bfloat16 a prompt's rows are rounded differently from those of single steps, so that an answer that was
# cut may go another way where two tokens are nearly tied.
OPTIONS = (*few_adapters(*list(ADAPTERS)[:12]), "--eager", "--instances", "2", "--dtype", "float32")
BY_TURNS = ("--routing", "round_robin")
MODELS = [*list(ADAPTERS)[:7], "demo"]
NUM_TOKENS = 80
"""Of each stream: enough for a kill in its middle."""


HELD = """
import os, time

while os.path.exists(os.environ["HOLD_STARTS"]):
    time.sleep(0.01)
"""
TRIES = 10
"""How often a test sends its streams while they are over before what is to happen to them."""


@pytest.fixture(scope="module", name="hold")
def hold_of_module(tmp_path_factory) -> Iterator[Path]:
    """While this file is there no process of a server starts its work."""
    folder = tmp_path_factory.mktemp("hold")
    (folder / "sitecustomize.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("HOLD_STARTS", str(folder / "hold"))
        yield folder / "hold"


@pytest.fixture(scope="module", name="pair")
def pair_of_module(tmp_path_factory, hold) -> Iterator[DemoServer]:
    with demo_server(tmp_path_factory.mktemp("pair") / "log", *OPTIONS, *BY_TURNS) as server:
        yield server


def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Poll ever more rarely: a process takes seconds to start, and a condition often reads all metrics."""
    deadline, pause_s = time.monotonic() + limit_s, 0.02
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def instance_values(server: DemoServer, name: str) -> list[float]:
    """A metric of each instance, by index; [] while no engine runs."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {
        int(s.labels["instance"].removeprefix("instance-")): s.value
        for s in samples
        if s.name == f"moe_lora:instance_{name}"
    }
    return [found[index] for index in sorted(found)]


def until_both_up(server: DemoServer) -> None:
    until(lambda: instance_values(server, "up") == [1.0, 1.0])


async def stream(http: httpx.AsyncClient, body: dict[str, Any], on_token: Callable[[], None]) -> list[dict]:
    """The events of a streamed completion."""
    events = []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                on_token()
    return events


def stream_all(
    server: DemoServer, bodies: list[dict], kill: Callable[[], None] | None = None, after: int = 0
) -> list[list[dict]]:
    """The events of each; `kill` is called once every stream has `after` of them."""
    counts = [0] * len(bodies)
    state = {"kill": kill}

    def counted(place: int) -> Callable[[], None]:
        def count() -> None:
            counts[place] += 1
            if state["kill"] is not None and min(counts) >= after:
                state.pop("kill")()
                state["kill"] = None

        return count

    async def run() -> list[list[dict]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(stream(http, b, counted(i)) for i, b in enumerate(bodies)))

    events = asyncio.run(run())
    assert state["kill"] is None, "the streams were over before the kill"
    return events


def summary(events: list[dict]) -> tuple[str, list[int], list[float], str | None, int]:
    choices = [event["choices"][0] for event in events if event.get("choices")]
    assert not [event for event in events if "error" in event]
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
        choices[-1]["finish_reason"],
        events[-1]["usage"]["completion_tokens"],
    )


WITHIN = "([a-z][0-9])+"


def check_same(found: Iterable[tuple], right: Iterable[tuple], *, logprobs: bool = False) -> None:
    """Summaries have equal texts, tokens, reasons and counts; logprobs: up to rounding."""
    for one, other in zip(found, right, strict=True):
        assert one[:2] == other[:2]
        assert not logprobs or one[2] == pytest.approx(other[2], abs=1e-3)
        assert one[3:] == other[3:]


def bodies(num: int) -> list[dict]:
    """Streams over several adapters, long enough to be killed in the middle; every third has a grammar."""
    return [
        {
            "model": MODELS[i % len(MODELS)],
            "prompt": prompt_for("abcdefgh"[i % 7 :] + "xyz"),
            "max_tokens": NUM_TOKENS,
            "min_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "guided_regex": WITHIN if i % 3 == 1 else None,
        }
        for i in range(num)
    ]


def complete(server: DemoServer, model: str, text: str = "abc") -> httpx.Response:
    body = {"model": model, "prompt": prompt_for(text), "max_tokens": 40, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)


def command(server: DemoServer, *words: str) -> str:
    """What a command of an administrator says, which must succeed."""
    done = CliRunner().invoke(main, [*words, "--url", server.url])
    assert done.exit_code == 0, done.output
    return done.output
