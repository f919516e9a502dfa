# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each instance while a request goes from its prefill instance to its decode instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moe_lora.config import FrontEndConfig

from .move_steps import MOVER, SOURCE, TARGET
from .test_move_kills import BODIES, LENGTH, Running, Stream, metrics, running_cluster

STEPS = ("reserved at the target", "paused", "last block sent", "state sent", "resumed at the target")
CELLS = [(step, victim) for step in STEPS for victim in (SOURCE, TARGET)]
QUICK = {("reserved at the target", SOURCE), ("resumed at the target", TARGET)}


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    front_end = FrontEndConfig(prefill_instances=(SOURCE,))
    with running_cluster(front_end, tmp_path_factory.mktemp("kills")) as one:
        one.expected += [stream.tokens for stream in asyncio.run(read(one))]
        assert [len(tokens) for tokens in one.expected] == [LENGTH] * len(BODIES)
        assert metrics(one.cluster.urls[MOVER])["migrations_total", ""] >= len(BODIES)
        yield one


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
