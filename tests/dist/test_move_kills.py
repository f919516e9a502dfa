# SPDX-License-Identifier: Apache-2.0
"""Source, target and front end of a move are killed with SIGKILL while it stands at one of its steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig

from .cluster_jobs import DEMO, until
from .move_steps import BY_TOKENS, MOVER, OTHER, SOURCE, STEPS, TARGET, SteppedCluster, streamed_bodies

LENGTH = 150
BODIES = streamed_bodies(LENGTH, lambda first: list(range(first, first + 40)))
NUM_MOVER = 4
"""Of the streams, those that are asked of the front end that moves one."""
CELLS = [
    (kind, step, victim)
    for kind, steps in STEPS.items()
    for step in steps
    for victim in ("source", "target", MOVER)
]
QUICK = {
    ("kv", "last block sent", "source"),
    ("tokens", "resumed at the target", "target"),
    ("kv", "paused", MOVER),
}
ROLES = {"source": SOURCE, "target": TARGET, MOVER: MOVER}
OWNED_BY_TARGET = BY_TOKENS[BY_TOKENS.index("acknowledged") :]


@dataclass
class Stream:
    """A client: what it got, and whether its answer came to its end or its connection broke."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None

    async def read(self, url: str) -> None:
        try:
            async with (
                httpx.AsyncClient(trust_env=False) as http,
                http.stream("POST", f"{url}/v1/completions", json=self.body) as response,
            ):
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:
            self.ended = "cut"

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.tokens += choice["token_ids"]
            self.ended = choice["finish_reason"] or self.ended


async def answers(url: str, bodies: list[dict[str, Any]] = BODIES) -> list[list[int]]:
    """Tokens of all streams, without a kill."""
    streams = [Stream(body) for body in bodies]
    await asyncio.gather(*(stream.read(url) for stream in streams))
    return [stream.tokens for stream in streams]


def metrics(url: str) -> dict[tuple[str, str], float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name.removeprefix("moe_lora:"), s.labels.get("instance", "")): s.value for s in samples}


@dataclass
class Running:
    cluster: SteppedCluster
    expected: list[list[int]] = field(default_factory=list)

    def is_whole(self) -> bool:
        """Whether both front ends have both instances, and these have nothing to do and keep nothing."""
        busy = ("instance_requests_running", "instance_requests_waiting", "instance_kv_cache_usage")
        for url in self.cluster.urls.values():
            try:
                found = metrics(url)
            except httpx.TransportError:
                return False
            for name in (SOURCE, TARGET):
                if not found.get(("instance_up", name)) or any(found[one, name] for one in busy):
                    return False
        return True

    def wait_until_whole(self) -> None:
        until(self.is_whole, lambda: f"not all are there, or not idle\n{self.cluster.text()}")

    async def read_all(self, kind: str, step: str, victim: str) -> tuple[list[Stream], dict[str, Any] | None]:
        """Streams, of which one was moved as the victim was killed; what the order to move was answered."""
        streams, urls = [Stream(body) for body in BODIES], self.cluster.urls
        reading = [
            asyncio.create_task(one.read(urls[MOVER if place < NUM_MOVER else OTHER]))
            for place, one in enumerate(streams)
        ]
        while min(len(one.tokens) for one in streams) < 3:
            await asyncio.sleep(0.005)
            assert not any(task.done() for task in reading), [one.ended for one in streams]
        self.cluster.stops.arm(step)
        order = {"source": SOURCE, "target": TARGET, "num_requests": 1, "kind": kind}
        async with httpx.AsyncClient(trust_env=False) as http:
            moving = asyncio.create_task(http.post(f"{urls[MOVER]}/v1/migrate", json=order))
            await asyncio.to_thread(
                self.cluster.wait_until_reached,
                lambda: step in BY_TOKENS[:5] and moving.done() and moving.result().text,
            )
            await asyncio.to_thread(self.cluster.kill, ROLES[victim])
            self.cluster.stops.disarm()
            await asyncio.gather(*reading)
            try:
                response = await moving
            except httpx.TransportError:
                assert victim == MOVER
                return streams, None
        assert response.status_code == 200, response.text
        return streams, response.json()


@contextmanager
def running_cluster(front_end: FrontEndConfig, folder: Path, **settings: Any) -> Iterator[Running]:
    """Two instances in fp32 behind both front ends; at the end no role may have failed."""
    engine = EngineConfig(
        model_dir=str(DEMO / "model"),
        adapters=tuple((name, str(DEMO / "adapters" / name)) for name in ("upper", "reverse")),
        dtype="float32",
        eager=True,
        num_instances=2,
        num_threads=1,
        **settings,
    )
    cluster = ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end)
    one = Running(SteppedCluster(cluster, folder))
    try:
        one.wait_until_whole()
        yield one
    finally:
        wrong = one.cluster.close()
    assert not wrong, f"{wrong}\n{one.cluster.text()}"
    assert not one.cluster.logged("Traceback"), one.cluster.text()


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    assert set(CELLS) >= QUICK
    front_end = FrontEndConfig(routing="round_robin")
    with running_cluster(front_end, tmp_path_factory.mktemp("moves")) as one:
        one.expected += asyncio.run(answers(one.cluster.urls[OTHER]))
        assert [len(tokens) for tokens in one.expected] == [LENGTH] * len(BODIES)
        yield one


@pytest.mark.parametrize(
    ("kind", "step", "victim"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS],
)
def test_kill_at_a_step_of_a_move_loses_and_doubles_no_token(running, kind, step, victim):
    """Streams are those of nobody moved and nobody killed; of a front end that is killed they are cut."""
    running.wait_until_whole()
    try:
        streams, answer = asyncio.run(running.read_all(kind, step, victim))
        for place, (stream, expected) in enumerate(zip(streams, running.expected, strict=True)):
            if victim == MOVER and place < NUM_MOVER:
                assert stream.ended == "cut"
                assert stream.tokens == expected[: len(stream.tokens)]
                assert 3 <= len(stream.tokens) < LENGTH
            else:
                assert (stream.ended, stream.tokens) == ("length", expected)
        if victim == MOVER:
            assert answer is None or step in OWNED_BY_TARGET
            again = Stream(BODIES[0])
            asyncio.run(again.read(running.cluster.urls[OTHER]))
            assert again.tokens == running.expected[0]
        else:
            moves = step in OWNED_BY_TARGET or (step, victim) == ("resumed at the target", "source")
            assert answer is not None
            assert (answer["moved"], len(answer["problems"])) == (int(moves), int(not moves))
    finally:  # a failure here is not the next kill's
        running.cluster.kill(ROLES[victim])
        running.cluster.start(ROLES[victim])
    running.wait_until_whole()
