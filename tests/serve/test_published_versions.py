# SPDX-License-Identifier: Apache-2.0
"""A trainer publishes versions of one name while clients stream from it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import save

from .demo_server import demo_server
from .test_controls import SEVERAL, Http
from .test_received import headers, tensors

PROMPT, NUM_TOKENS = "stream=", 12
GROWTH_BYTES = 96 << 20
"""Allowed between a quarter of the versions and the last; a version's tensors have 0.4 MB."""


def streamed(url: str) -> tuple[str, int]:
    """Text and version of one stream from the published name."""
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    text, version = "", None
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["text"]
                version = choice.get("adapter_version", version)
    assert version is not None, text
    return text, version


@pytest.mark.parametrize(
    ("num_versions", "num_streams"), [(6, 2), pytest.param(100, 16, marks=pytest.mark.slow)]
)
def test_each_answer_is_of_one_version(tmp_path: Path, num_versions: int, num_streams: int) -> None:
    """Odd versions are one adapter and even versions another, so a mixed answer differs from both."""
    names = ("reverse", "upper")
    bodies = {name: save(tensors(name)) for name in names}
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32") as server:
        http, stop = Http(server.url), threading.Event()
        expected, sizes, answers = [], [], set()

        def publish(version: int) -> None:
            name = names[version % 2]
            card = http.ok("PUT", "/v1/adapters/policy", content=bodies[name], headers=headers(name))
            assert card["version"] == version

        def stream() -> set[tuple[str, int]]:
            found = set()
            while not stop.is_set():
                found.add(streamed(server.url))
            return found

        for version in (1, 2):
            publish(version)
            expected.append(streamed(server.url)[0])
        assert expected[0] != expected[1]
        with ThreadPoolExecutor(num_streams) as pool:
            streams = [pool.submit(stream) for _ in range(num_streams)]
            try:
                for version in range(3, num_versions + 1):
                    publish(version)
                    answers.add(streamed(server.url))
                    root = psutil.Process(server.process.pid)
                    sizes.append(sum(one.memory_info().rss for one in (root, *root.children(recursive=True))))
            finally:
                stop.set()
            answers.update(*(one.result() for one in streams))
    assert {text for text, _ in answers} == set(expected)
    assert all(text == expected[(version - 1) % 2] for text, version in answers)
    assert {version for _, version in answers} >= {*range(3, num_versions + 1)}
    assert sizes[-1] < sizes[len(sizes) // 4] + GROWTH_BYTES


@pytest.mark.slow
def test_two_publishers_of_one_name_get_versions_of_their_own(tmp_path: Path) -> None:
    names, num_each = ("reverse", "upper"), 3
    bodies = {name: save(tensors(name)) for name in names}
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32", *SEVERAL) as server:
        server.wait_for_instances()
        http, stop = Http(server.url), threading.Event()
        expected = {}
        for name in names:
            http.ok("PUT", "/v1/adapters/policy", content=bodies[name], headers=headers(name))
            expected[name] = streamed(server.url)[0]

        def publish(name: str) -> list[int]:
            def put() -> int:
                content, head = bodies[name], headers(name)
                return int(http.ok("PUT", "/v1/adapters/policy", content=content, headers=head)["version"])

            return [put() for _ in range(num_each)]

        def stream() -> set[tuple[str, int]]:
            found = set()
            while not stop.is_set():
                found.add(streamed(server.url))
            return found

        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(stream) for _ in range(2)]
            try:
                published = dict(zip(names, pool.map(publish, names), strict=True))
            finally:
                stop.set()
            answers = set().union(*(one.result() for one in streams))
        last = {streamed(server.url) for _ in range(8)}  # by both front ends and instances
    owners = {version: name for name, versions in published.items() for version in versions}
    assert sorted(owners) == [*range(3, 3 + 2 * num_each)]
    owners |= {1: names[0], 2: names[1]}
    assert all(text == expected[owners[version]] for text, version in answers | last)
    assert {version for _, version in last} == {max(owners)}
