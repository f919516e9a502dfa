# SPDX-License-Identifier: Apache-2.0
"""Prefill instance, decode instance and front end are killed while KV leaves beside a prompt's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moe_lora.config import FrontEndConfig

from .move_steps import MOVER, OTHER, SOURCE, streamed_bodies
from .test_move_kills import NUM_MOVER, ROLES, Running, Stream, answers, running_cluster

STEPS = (
    "ordered",
    "reserved at the target",
    "first blocks copied",
    "last block sent",
    "resumed at the target",
    "acknowledged",
)
LENGTH = 60
CHUNK = 8
"""Tokens of a step: the first pages leave many steps before the first token."""
BODIES = streamed_bodies(LENGTH, lambda first: [(first + 7 * place) % 90 + 10 for place in range(160)])


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    front_end = FrontEndConfig(prefill_instances=(SOURCE,))
    folder = tmp_path_factory.mktemp("prompts")
    with running_cluster(front_end, folder, max_num_batched_tokens=CHUNK, max_num_seqs=CHUNK) as one:
        one.expected += asyncio.run(answers(one.cluster.urls[OTHER], BODIES))
        assert [len(tokens) for tokens in one.expected] == [LENGTH] * len(BODIES)
        yield one


async def read_all(running: Running, step: str, victim: str) -> list[Stream]:
    """Streams during whose prompts the victim was killed.  The salt: no prompt is cached."""
    streams = [Stream({**body, "cache_salt": f"{step}, {victim}"}) for body in BODIES]
    cluster = running.cluster
    cluster.stops.arm(step)
    reading = [
        asyncio.create_task(one.read(cluster.urls[MOVER if place < NUM_MOVER else OTHER]))
        for place, one in enumerate(streams)
    ]
    await asyncio.to_thread(cluster.wait_until_reached, lambda: all(task.done() for task in reading))
    await asyncio.to_thread(cluster.kill, ROLES[victim])
    cluster.stops.disarm()
    await asyncio.gather(*reading)
    return streams


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["source", "target", MOVER])
@pytest.mark.parametrize("step", STEPS)
def test_kill_during_a_prompt_loses_and_doubles_no_token(running, step, victim):
    running.wait_until_whole()
    streams = asyncio.run(read_all(running, step, victim))
    for place, (stream, expected) in enumerate(zip(streams, running.expected, strict=True)):
        if victim == MOVER and place < NUM_MOVER:
            assert stream.ended in ("cut", "length")
            assert stream.tokens == expected[: len(stream.tokens)]
        else:
            assert (stream.ended, stream.tokens) == ("length", expected)
    running.cluster.start(ROLES[victim])
    running.wait_until_whole()
