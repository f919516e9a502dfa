# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each instance while a request goes from its prefill instance to its decode instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig

from .cluster_jobs import DEMO
from .move_steps import MOVER, SOURCE, TARGET, SteppedCluster
from .test_move_kills import BODIES, LENGTH, Running, Stream, metrics

STEPS = ("reserved at the target", "paused", "last block sent", "state sent", "resumed at the target")
CELLS = [(step, victim) for step in STEPS for victim in (SOURCE, TARGET)]
QUICK = {("reserved at the target", SOURCE), ("resumed at the target", TARGET)}


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    engine = EngineConfig(
        model_dir=str(DEMO / "model"),
        adapters=tuple((name, str(DEMO / "adapters" / name)) for name in ("upper", "reverse")),
        dtype="float32",
        eager=True,
        num_instances=2,
        num_threads=1,
    )
    front_end = FrontEndConfig(prefill_instances=(SOURCE,))
    settings = ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end)
    one = Running(SteppedCluster(settings, tmp_path_factory.mktemp("kills")))
    try:
        one.wait_until_whole()
        one.expected += [stream.tokens for stream in asyncio.run(read(one))]
        assert [len(tokens) for tokens in one.expected] == [LENGTH] * len(BODIES)
        assert metrics(one.cluster.urls[MOVER])["migrations_total", ""] >= len(BODIES)
        yield one
    finally:
        wrong = one.cluster.close()
    assert not wrong, f"{wrong}\n{one.cluster.text()}"
    assert not one.cluster.logged("Traceback"), one.cluster.text()


async def read(running: Running, step: str = "", victim: str = "") -> list[Stream]:
    """Streams; the victim is killed when a move stands at the step."""
    streams = [Stream(body) for body in BODIES]
    if step:
        running.cluster.stops.arm(step)
    reading = [asyncio.create_task(one.read(running.cluster.urls[MOVER])) for one in streams]
    if step:
        await asyncio.to_thread(running.cluster.wait_until_reached, lambda: "")
        await asyncio.to_thread(running.cluster.kill, victim)
        running.cluster.stops.disarm()
    await asyncio.gather(*reading)
    return streams


@pytest.mark.parametrize(
    ("step", "victim"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS],
)
def test_kill_at_a_hand_over_loses_and_doubles_no_token(running, step, victim):
    running.wait_until_whole()
    for stream, expected in zip(asyncio.run(read(running, step, victim)), running.expected, strict=True):
        assert (stream.ended, stream.tokens) == ("length", expected)
    running.cluster.start(victim)
    running.wait_until_whole()
