# SPDX-License-Identifier: Apache-2.0
"""Real instances that share their adapters, and what happens when those that hold them are killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.shared_memory import names_in_shm

from .demo_server import DEMO, DemoServer, demo_server
from .instance_parts import gone, until, until_both_up
from .test_placement_instances import ADAPTERS, complete_all

FLEET = ("--eager", "--instances", "2", "--dtype", "float32", "--routing", "round_robin", "--max-loras", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Adapters in a folder of one's own."""
    place = tmp_path_factory.mktemp("adapters")
    for name in ADAPTERS:
        shutil.copytree(DEMO / "adapters" / name, place / name)
    return place


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory) -> dict[str, str]:
    """Each adapter's answer from a single engine without a pool."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with demo_server(log, "--lora-dir", str(folder), "--eager", "--dtype", "float32") as server:
        return dict(zip(ADAPTERS, complete_all(server, ADAPTERS), strict=True))


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory) -> Iterator[DemoServer]:
    log = tmp_path_factory.mktemp("pair") / "log"
    with demo_server(log, "--lora-dir", str(folder), *FLEET, "--set", "pool.replicas=1") as server:
        yield server


def samples(server: DemoServer, name: str) -> dict[str, float]:
    """A metric's values by instance, or by source."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {
        s.labels.get("instance", s.labels.get("source", "")): s.value
        for s in found
        if s.name == f"moe_lora:{name}"
    }


def fetches(server: DemoServer) -> dict[str, float]:
    return samples(server, "pool_fetches_total")


def windows(pid: int) -> list[int]:
    """Bytes of the windows that a process has mapped, its own and others'."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    found = re.findall(r"^(\w+)-(\w+) .*memfd:moe_lora", maps, re.MULTILINE)
    return [int(end, 16) - int(start, 16) for start, end in found]


def post(server: DemoServer, path: str, body: dict) -> None:
    response = httpx.post(f"{server.url}/v1/{path}", json=body, trust_env=False)
    assert response.status_code == 200, response.text


def residencies(server: DemoServer) -> dict[str, str]:
    cards = httpx.get(f"{server.url}/v1/adapters", trust_env=False).json()["data"]
    return {card["id"]: card["residency"] for card in cards}


def check_answers(server: DemoServer, alone: dict[str, str], rounds: int = 1) -> None:
    models = ADAPTERS * rounds + ADAPTERS[::-1]
    assert complete_all(server, models) == [alone[model] for model in models]


def test_answers_are_the_same_and_each_adapter_is_held_once(pair, alone):
    check_answers(pair, alone)
    assert fetches(pair)["peer"] >= 1
    assert fetches(pair)["disk"] == 0
    held = samples(pair, "instance_pool_adapters")
    assert sorted(held.values()) == [3, 3]
    for pid, num_bytes in zip(pair.engine_pids(), samples(pair, "instance_pool_bytes").values(), strict=True):
        big = [size for size in windows(pid) if size > 64 << 10]
        assert len(big) == 3, "an instance has no memory of what it does not hold"
        assert sum(big) < num_bytes + 3 * (16 << 10)
    assert set(residencies(pair).values()) <= {"device", "host"}


def test_adapter_that_is_unloaded_leaves_no_memory_anywhere(pair, alone, folder):
    def held() -> list[int]:
        return sorted(size for pid in pair.engine_pids() for size in windows(pid) if size > 64 << 10)

    before = held()
    shared = names_in_shm()
    path = str(folder / ADAPTERS[0])
    post(pair, "load_lora_adapter", {"lora_name": "extra", "lora_path": path})
    until(lambda: held() == before)  # its content was held already
    assert set(complete_all(pair, ["extra"] * 4)) == {alone[ADAPTERS[0]]}
    other = next(
        place for place in (DEMO / "adapters").iterdir() if place.is_dir() and place.name not in ADAPTERS
    )
    post(pair, "load_lora_adapter", {"lora_name": "other", "lora_path": str(other)})
    until(lambda: len(held()) == 7)
    assert len(set(complete_all(pair, ["other"] * 4))) == 1
    post(pair, "unload_lora_adapter", {"lora_name": "other"})
    post(pair, "unload_lora_adapter", {"lora_name": "extra"})
    until(lambda: held() == before)
    assert names_in_shm() == shared
    check_answers(pair, alone)


def test_answers_come_from_disk_when_the_only_holder_is_killed(pair, alone):
    victim = pair.engine_pids()[0]
    os.kill(victim, signal.SIGKILL)
    check_answers(pair, alone)
    until(lambda: gone(victim))
    until_both_up(pair)
    check_answers(pair, alone)
    until(lambda: sorted(samples(pair, "instance_pool_adapters").values()) == [3, 3])
    check_answers(pair, alone)


@pytest.mark.slow
def test_answers_come_from_the_other_replica_when_one_is_killed(folder, alone, tmp_path):
    three = (
        *FLEET[:1],
        "--instances",
        "3",
        *FLEET[3:],
        "--set",
        "pool.replicas=2",
        "--lora-dir",
        str(folder),
    )
    hidden = tmp_path / "hidden"
    with demo_server(tmp_path / "log", *three) as server:
        until(lambda: sorted(samples(server, "instance_pool_adapters").values()) == [4, 4, 4])
        folder.rename(hidden)
        try:
            os.kill(server.engine_pids()[0], signal.SIGKILL)
            check_answers(server, alone)
            until(lambda: fetches(server)["peer"] >= 1)  # counted with an instance's next report
            assert fetches(server)["disk"] == 0
        finally:
            hidden.rename(folder)


@pytest.mark.slow
def test_adapters_move_with_the_placement_while_answers_stay_the_same(folder, alone, tmp_path):
    placed = (
        "--placement",
        "loraserve",
        "--set",
        "front_end.placement_interval_s=0.2",
        "--set",
        "pool.replicas=1",
    )
    options = (*FLEET[:5], "--max-loras", "2", "--lora-dir", str(folder))
    with demo_server(tmp_path / "log", *options, *placed) as server:
        moves = 0.0
        for round_number in range(60):  # the demand shifts from the first adapters to the last
            models = [ADAPTERS[min(5, (round_number + place) // 2)] for place in range(6)] * 2 + ADAPTERS
            assert complete_all(server, models) == [alone[model] for model in models]
            moves = samples(server, "placement_moves_total")[""]
            if round_number >= 8 and moves >= 1:
                break
        assert moves >= 1
        assert samples(server, "pool_failed_sources_total")[""] == 0
        until(lambda: sum(samples(server, "instance_pool_adapters").values()) < 12)
