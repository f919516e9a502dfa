# SPDX-License-Identifier: Apache-2.0
"""What the soak makes of its samples, and that the load's answers are what it takes them for."""

from __future__ import annotations

import asyncio

import pytest

from bench.hostile.bench_crowd import problems
from bench.hostile.bench_soak import growth, is_flat
from bench.hostile.mixed import Answer, ask

NOISE = (0.3, -0.4, 0.1, -0.2, 0.2)


def line(per_hour: float, noise: float = 1.0) -> list[tuple[float, float]]:
    """Half an hour, a sample every two seconds."""
    return [(s, 100 + per_hour * s / 3600 + noise * NOISE[s // 2 % 5]) for s in range(0, 1800, 2)]


def test_slope_is_that_of_the_line_after_the_first_minutes():
    warming = [(s, value + max(0, 300 - s)) for s, value in line(per_hour=7.0)]
    found = growth(warming, from_s=300)
    assert found["per_hour"] == pytest.approx(7.0, abs=0.2)
    assert found["grew"] == pytest.approx(7.0 * 1498 / 3600, abs=0.1)


@pytest.mark.parametrize(
    ("per_hour", "measure", "flat"),
    [
        (0.0, "rss_mb", True),
        (1.0, "rss_mb", True),
        (20.0, "rss_mb", False),
        (-20.0, "rss_mb", True),
        (4.0, "files", False),
        (0.5, "files", True),
    ],
)
def test_what_grows_is_told_from_noise(per_hour, measure, flat):
    assert is_flat(measure, growth(line(per_hour), from_s=300)) is flat


def test_growth_within_its_error_is_flat():
    swinging = [(s, value + 40 * (s // 300 % 2)) for s, value in line(per_hour=8.0)]
    assert is_flat("rss_mb", growth(swinging, from_s=300))


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b'data: {"id": "1", "choices": [{"text": "a"}]}\n\n'
ERROR = b'data: {"error": {"code": 503, "message": "no instance"}}\n\n'


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (HEAD + 2 * EVENT + b"data: [DONE]\n\n", Answer(200, "aa")),
        (HEAD + EVENT, Answer(0, "a")),
        (HEAD + EVENT + ERROR, Answer(503, "a")),
        (HEAD + b'{"choices": [{"text": "b"}, {"text": "c"}]}\n', Answer(200, "bc")),
        (b"HTTP/1.1 404 Not Found\r\n\r\n{}", Answer(404, "{}")),
        (b"", Answer(0)),
    ],
)
def test_an_answer_is_what_was_said(sent, answer):
    async def run() -> Answer:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await ask(server.sockets[0].getsockname()[1], "/v1/completions", b"{}")

    assert asyncio.run(run()) == answer


def test_a_crowd_of_which_one_is_lost_or_a_file_stays_is_a_problem():
    nobody, after = {"files": 12}, {"files": 12, "tracebacks": 0, "refused": 0}
    streams, crowd = {"right": 100}, {"right": 16, "kept": 1000, "files_at_most": 1012}
    assert problems([nobody, streams, crowd, after], 100, 1000) == []
    assert problems([nobody, {"right": 99, "wrong 0": 1}, crowd, after], 100, 1000)
    assert problems([nobody, streams, crowd | {"kept": 999}, after], 100, 1000)
    assert problems([nobody, streams, crowd, after | {"files": 13}], 100, 1000)
    assert problems([nobody, streams, crowd, after | {"refused": 1}], 100, 1000)
