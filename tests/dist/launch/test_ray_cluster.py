# SPDX-License-Identifier: Apache-2.0
"""A cluster on Ray: parts without Ray, and a Ray cluster of several nodes on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_lora.serve.api_keys import ApiKey, add_key
from tests.dist.cluster_jobs import ADAPTERS, DEMO, Drive, Host, local_answers, make_requests, until
from tests.dist.launch.ray_nodes import RayNodes
from tests.patience import PATIENCE_S

CONTENT: dict[str, Any] = {
    "model_dir": str(DEMO / "model"),
    "served_model_name": "demo",
    "adapters": {name: str(DEMO / "adapters" / name) for name in ADAPTERS},
    "engine": {"num_instances": 2, "dtype": "float32", "eager": True, "num_threads": 1, "device": "cpu"},
    "lora_server": {"layout": "EP2-PP1", "capacity": 4},
    "front_end": {"routing": "round_robin", "port": 8300},
}
REQUESTS = make_requests(16)


class Served:
    """A cluster of `up` under test."""

    def __init__(self, nodes: RayNodes, content: dict[str, Any] = CONTENT, key: str | None = None) -> None:
        """key: of clients."""
        self.nodes, self.key = nodes, {} if key is None else {"key": key}
        self.file = nodes.folder / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(content))
        done = nodes.run("up", str(self.file), "--on", "ray")
        assert done.returncode == 0, done.stdout + done.stderr
        self.progress = done.stdout.splitlines()

    def host_of(self, role: str) -> str:
        return self.nodes.status()[role][1]

    def drive(self, times: int = 1, pause_s: float = 0.0, url: str | None = None) -> Drive:
        bodies = [
            {
                "model": model or "demo",
                "prompt": prompt,
                "max_tokens": 8,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            }
            for model, prompt in REQUESTS * times
        ]
        url = url or self.nodes.status()["front-end-0"][2]
        host = Host("client", "127.0.0.1", self.nodes.folder)
        return Drive(host, {"url": url, "bodies": bodies, "pause_s": pause_s, **self.key})

    def wait_until_whole(self, num_instances: int = 2) -> None:
        """Until each role serves."""
        shown: dict[str, Any] = {}

        def whole() -> bool:
            shown.clear()
            shown.update(self.nodes.status())
            states = sorted(state for state, *_ in shown.values())
            return states == ["ready", *["running"] * (2 + num_instances)]

        until(whole, lambda: str(shown))

    def lose_host_of(self, role: str) -> None:
        """Kill the role's host; until all roles serve elsewhere."""
        host = self.host_of(role)
        self.nodes.kill(host)

        def moved() -> bool:
            _, found, *_ = self.nodes.status().get(role, ("", "", ""))
            return found not in ("", host)

        until(moved, lambda: str(self.nodes.status()))
        self.wait_until_whole()
        self.nodes.add(host)

    def keepers(self) -> list[int]:
        return [pid for pid, words in self.nodes.roles().items() if "Keeper" in words]


def ray_nodes(num_nodes: int, num_cpus: int, **environment: str) -> Iterator[RayNodes]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    found = RayNodes(num_nodes, num_cpus, **environment)
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    yield from ray_nodes(4, num_cpus=3)


@pytest.fixture
def narrow() -> Iterator[RayNodes]:
    """Two nodes with room for four roles."""
    yield from ray_nodes(3, num_cpus=2)


@pytest.fixture
def small() -> Iterator[RayNodes]:
    """A node with room for two roles."""
    yield from ray_nodes(2, num_cpus=2)


def assert_nothing_is_left(nodes: RayNodes) -> None:
    until(lambda: not nodes.roles(), lambda: str(nodes.roles()))
    assert not list((nodes.folder / "tmp").iterdir())
    assert not list((nodes.folder / "state").rglob("ray-*"))
    done = nodes.run("status")
    assert done.returncode == 1
    assert "no cluster named moe-lora is on this Ray cluster" in done.stderr


@pytest.mark.slow
def test_a_cluster_that_can_not_start_leaves_nothing(small: RayNodes) -> None:
    file = small.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(CONTENT))
    done = small.run("up", str(file), "--on", "ray", "--name", "A")
    assert "--name A: give at most 40 of a-z, 0-9 and -" in done.stderr

    with subprocess.Popen(
        small.command("up", str(file), "--on", "ray"),
        env=small.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "waits for room (no host has 1 CPU free)" in line:
                    break
            done = small.run("up", str(file), "--on", "ray")
            assert done.returncode == 1
            assert "a cluster named moe-lora is on this Ray cluster; see moe-lora cluster" in done.stderr
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait(PATIENCE_S) != 0
        finally:
            process.kill()
    assert_nothing_is_left(small)

    alone = {name: value for name, value in CONTENT.items() if name != "lora_server"}
    file.write_text(yaml.safe_dump({**alone, "model_dir": "/no/model"}))
    done = small.run("up", str(file), "--on", "ray")
    assert done.returncode == 1
    assert "instance-" in done.stderr
    assert "can't be started: " in done.stderr
    assert "/no/model" in done.stderr
    assert_nothing_is_left(small)


@pytest.mark.slow
def test_a_ray_cluster_that_admits_anyone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(CONTENT))
    for nodes in ray_nodes(1, num_cpus=0, RAY_AUTH_MODE="disabled"):
        done = nodes.run("up", str(file), "--on", "ray")
        assert done.returncode == 1
        assert "any host with a way to 127.0.0.2 can run commands on this Ray cluster" in done.stderr
        assert "RAY_AUTH_MODE=token" in done.stderr
        assert_nothing_is_left(nodes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cluster_on_ray_answers_and_outlives_lost_hosts(nodes: RayNodes) -> None:
    expected = local_answers(REQUESTS)
    served = Served(nodes)
    served.wait_until_whole()
    assert served.drive().answers() == expected

    for role in ("instance-1", "front-end-0", "lora-server-0"):
        served.lose_host_of(role)
        assert served.drive().answers() == expected

    before, [keeper] = nodes.status(), served.keepers()
    os.kill(keeper, signal.SIGKILL)
    until(lambda: served.keepers() not in ([], [keeper]), lambda: "a new keeper")
    served.wait_until_whole()
    assert {role: one[1] for role, one in nodes.status().items()} == {
        role: one[1] for role, one in before.items()
    }
    assert served.drive().answers() == expected

    for number in (1, 2, 1, 2):
        running = served.drive(4)
        assert nodes.run("scale", "instance", str(number)).returncode == 0
        served.wait_until_whole(number)
        assert running.answers() == expected * 4

    assert nodes.run("down").returncode == 0
    assert_nothing_is_left(nodes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_drained_host_has_no_roles_and_no_request_fails(nodes: RayNodes) -> None:
    expected = local_answers(REQUESTS)
    served = Served(nodes)
    served.wait_until_whole()
    done = nodes.run("drain", "127.0.0.99")
    assert (done.returncode, "no host 127.0.0.99 is in this Ray cluster" in done.stderr) == (1, True)
    url_host = served.host_of("front-end-0")
    host = next(one for name in ("instance-0", "instance-1") if (one := served.host_of(name)) != url_host)
    running = served.drive(8)
    done = nodes.run("drain", host)
    assert (done.returncode, done.stdout) == (0, f"{host} is drained and has no roles\n"), done.stderr
    assert running.answers() == expected * 8
    shown = nodes.status()
    assert list(shown.pop("host")[:2]) == ["drained", host]
    assert host not in [found for _, found, *_ in shown.values()]
    assert served.drive().answers() == expected
    assert nodes.run("undrain", host).stdout == f"{host} takes roles\n"
    assert nodes.run("undrain", host).returncode == 1
    assert "host" not in nodes.status()
    assert nodes.run("down").returncode == 0
    assert_nothing_is_left(nodes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_burst_adds_instances_and_quiet_takes_them_back(narrow: RayNodes, tmp_path: Path) -> None:
    expected, keys = local_answers(REQUESTS), tmp_path / "keys.json"
    key = add_key(keys, ApiKey(id="k", digest="0" * 64, tenant="t", adapters=("*",)))
    content = {
        **CONTENT,
        "engine": {**CONTENT["engine"], "num_instances": 1, "max_num_seqs": 2},
        "lora_server": {"layout": "EP1-PP1", "capacity": 16},
        "front_end": {**CONTENT["front_end"], "api_keys": str(keys)},
        "scaling": {
            "max_instances": 3,
            "waiting_high": 2,
            "interval_s": 1,
            "add_pause_s": 1,
            "remove_pause_s": 5,
        },
    }
    served, begun_s = Served(narrow, content, key), time.monotonic()
    until(lambda: narrow.status()["instance-0"][0] == "running", lambda: str(narrow.status()))
    url = narrow.status()["front-end-0"][2]

    def number() -> int:
        return sum(role.startswith("instance") for role in narrow.status())

    def wait_for(condition: Callable[[], object], text: str) -> None:
        until(condition, lambda: f"{text}: {narrow.status()}")
        print(f"{time.monotonic() - begun_s:6.1f} s: {text}: {narrow.status()['scaling']}")

    wait_for(lambda: number() == 1, "start")
    assert served.drive(2, url=url).answers() == expected * 2  # two run and two wait
    wait_for(lambda: number() == 1, "steady")
    is_over = threading.Event()

    def drive_on() -> int:
        num_drives = 0
        while not is_over.is_set():
            assert served.drive(2, url=url).answers() == expected * 2
            num_drives += 1
        return num_drives

    with ThreadPoolExecutor(3) as pool:
        burst = [pool.submit(drive_on) for _ in range(3)]  # two run and ten wait
        try:
            wait_for(lambda: number() == 3, "more")
            wait_for(lambda: narrow.status()["instance-1"][0] == "running", "an instance joined")
            no_room = "no host has room for instance-2"
            wait_for(lambda: no_room in narrow.status()["scaling"][-1], "without room")
        finally:
            is_over.set()
        assert all(one.result() for one in burst)
        print(f"{time.monotonic() - begun_s:6.1f} s: the burst is over")
    wait_for(lambda: number() == 1, "quiet")
    assert served.drive(url=url).answers() == expected
    done = narrow.run("scale", "instance", "4")
    assert "4 instances are outside of scaling.min_instances=1 and scaling.max_instances=3" in done.stderr
    running = served.drive(4, url=url)
    assert narrow.run("scale", "instance", "2").returncode == 0
    assert number() == 2
    assert running.answers() == expected * 4
    wait_for(lambda: number() == 1, "as before a user's number")
    assert narrow.run("down").returncode == 0
    assert_nothing_is_left(narrow)
