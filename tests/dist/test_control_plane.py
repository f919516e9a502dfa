# SPDX-License-Identifier: Apache-2.0
"""Two front ends, a controller and two instances as processes, each of which may end under the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import yaml

from tests.patience import PATIENCE_S

from .cluster_jobs import (
    ADAPTERS,
    DEMO,
    Cluster,
    Drive,
    Host,
    Job,
    free_port,
    local_answers,
    make_requests,
    until,
)

REQUESTS = make_requests(12)
FRONT_ENDS = ("one", "two")
LOADED = "loaded"
"""An adapter that is loaded over HTTP; its files are those of the first of the file."""


class ControlledCluster(Cluster):
    """As `Cluster`, without a LoRA Server, with several front ends and their controller.

    leadership: of controllers by these names, in place of one.  hosts: of roles, where not all are on this
    one; the host of requests is front-end.
    """

    def __init__(
        self,
        folder: Path,
        controllers: Sequence[str] = ("controller",),
        leadership: dict | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        roles = ("front-end", "lora-server", *FRONT_ENDS, *controllers, "instance-1", "instance-2")
        here = {role: Host(role, "127.0.0.1", folder / role) for role in roles}
        super().__init__({**here, **(hosts or {})}, transport="shm")
        self.urls = {name: f"http://{self.hosts[name].address}:{free_port()}" for name in FRONT_ENDS}
        for host in self.hosts.values():
            path = host.folder / "cluster.yaml"
            content = yaml.safe_load(path.read_text())
            del content["lora_server"]
            content["front_end"] = {"placement": "loraserve", "placement_interval_s": 1.0}
            content["front_ends"] = {
                name: {
                    "host": self.hosts[name].address,
                    "port": int(url.rpartition(":")[2]),
                    "engines_address": self._address(name, "listener"),
                }
                for name, url in self.urls.items()
            }
            places = {
                name: {
                    "address": self._address(name, "address"),
                    "engines_address": self._address(name, "listener"),
                }
                for name in controllers
            }
            if leadership is None:
                content["controller"] = places["controller"]
            else:
                content |= {"controllers": places, "leadership": leadership}
            path.write_text(yaml.safe_dump(content))

    def _address(self, role: str, what: str) -> str:
        """The same in every copy of the file."""
        self._addresses = getattr(self, "_addresses", {})
        address = f"{self.hosts[role].address}:{free_port()}"
        return self._addresses.setdefault((role, what), address)

    def serve(self, name: str, *options: str) -> Job:
        words = ["-m", "moe_lora.cli.main", "serve", "--config", "cluster.yaml", *options]
        return self._start(name, words)

    def controller(self) -> Job:
        return self.serve("controller", "--role", "controller")

    def controller_named(self, name: str) -> Job:
        return self.serve(name, "--role", "controller", "--name", name)

    def front_end_named(self, name: str) -> Job:
        return self.serve(name, "--role", "front-end", "--name", name)

    def over(self, name: str, requests: list[tuple[str | None, str]]) -> Drive:
        self.url = self.urls[name]
        return self.drive(requests)

    def post(self, name: str, path: str, body: dict) -> httpx.Response:
        return httpx.post(f"{self.urls[name]}{path}", json=body, timeout=PATIENCE_S, trust_env=False)

    def load(self, name: str, adapter: str = LOADED, **more: object) -> httpx.Response:
        body = {"lora_name": adapter, "lora_path": str(DEMO / "adapters" / ADAPTERS[0]), **more}
        return self.post(name, "/v1/load_lora_adapter", body)

    def metric(self, name: str, metric: str) -> float:
        text = httpx.get(f"{self.urls[name]}/metrics", trust_env=False).text
        found = re.search(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.M)
        assert found is not None, text
        return float(found[1])

    def version(self, name: str, adapter: str) -> int:
        cards = httpx.get(f"{self.urls[name]}/v1/adapters", trust_env=False).json()["data"]
        return next(card["version"] for card in cards if card["id"] == adapter)


class Running:
    def __init__(self, cluster: ControlledCluster) -> None:
        self.cluster = cluster
        self.controller = cluster.controller()
        self.front_ends = {name: cluster.front_end_named(name) for name in FRONT_ENDS}
        self.instances = [cluster.plain_instance(f"instance-{number}") for number in (1, 2)]
        for job in (self.controller, *self.front_ends.values()):
            job.wait_for("instance instance-. dialled in", 2)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return local_answers(REQUESTS)


@pytest.fixture(scope="module")
def running(tmp_path_factory, expected) -> Iterator[Running]:
    cluster = ControlledCluster(tmp_path_factory.mktemp("controlled"))
    try:
        yield Running(cluster)
    finally:
        cluster.stop()


def of_loaded(requests: list[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """The same requests, those for the first adapter by the name that was loaded over HTTP."""
    return [(LOADED if model == ADAPTERS[0] else model, prompt) for model, prompt in requests]


def test_both_front_ends_give_the_tokens_of_one_local_engine(running, expected):
    for name in FRONT_ENDS:
        assert running.cluster.over(name, REQUESTS).answers() == expected


def test_what_is_loaded_over_one_is_used_over_the_other_at_once(running, expected):
    assert running.cluster.load("one").status_code == 200
    assert running.cluster.over("two", of_loaded(REQUESTS)).answers() == expected
    answer = running.cluster.load("two")
    assert (answer.status_code, "already been loaded" in answer.text) == (400, True)


def test_a_controller_killed_under_requests_costs_none(running, expected):
    cluster = running.cluster
    assert cluster.load("one", load_inplace=True).status_code == 200
    until(lambda: cluster.metric("two", "moe_lora:placement_tables_total") >= 2, lambda: "no second table")
    drives = [cluster.over(name, of_loaded(REQUESTS) * 3) for name in FRONT_ENDS]
    running.controller.process.kill()
    running.controller.process.wait(PATIENCE_S)
    until(
        lambda: not any(cluster.metric(name, "moe_lora:controller_up") for name in FRONT_ENDS),
        lambda: "the controller's end is not noticed",
    )
    table = cluster.metric("one", "moe_lora:placement_tables_total")
    state = cluster.metric("one", "moe_lora:controller_state")
    answer = cluster.load("one", "other")
    assert answer.status_code == 503
    assert "the controller is away" in answer.json()["error"]["message"]
    assert cluster.over("two", of_loaded(REQUESTS)).answers() == expected
    running.controller = cluster.controller()
    running.controller.wait_for("the controller begins", 2)
    for drive in drives:
        assert drive.answers() == expected * 3
    assert cluster.over("one", of_loaded(REQUESTS)).answers() == expected
    assert cluster.version("one", LOADED) == 2
    assert cluster.load("two", load_inplace=True).status_code == 200
    assert cluster.version("one", LOADED) == 3
    until(
        lambda: cluster.metric("one", "moe_lora:placement_tables_total") > table, lambda: "no further table"
    )
    assert cluster.metric("one", "moe_lora:controller_state") > state


def test_a_front_end_that_is_killed_leaves_the_other(running, expected):
    cluster = running.cluster
    drive = cluster.over("two", of_loaded(REQUESTS) * 3)
    running.front_ends["one"].process.kill()
    running.front_ends["one"].process.wait(PATIENCE_S)
    assert drive.answers() == expected * 3
    assert cluster.load("two", "more").status_code == 200
    running.front_ends["one"] = cluster.front_end_named("one")
    running.front_ends["one"].wait_for("Serving demo at", 2)
    assert cluster.over("one", [("more", prompt) for _, prompt in REQUESTS[:2]]).answers()


@pytest.mark.slow
def test_without_front_ends_or_controller_instances_still_know_what_is_served(running, expected):
    """All that decided is killed; nothing but the instances says that something was loaded over HTTP."""
    cluster = running.cluster
    for _ in range(2):
        assert cluster.load("one", load_inplace=True).status_code == 200
    version = cluster.version("one", LOADED)
    assert version > 1
    for job in (running.controller, *running.front_ends.values()):
        job.process.kill()
        job.process.wait(PATIENCE_S)
    running.controller = cluster.controller()
    # What its log holds is of the one before it, too.
    served = {name: job.count("Serving demo at") for name, job in running.front_ends.items()}
    running.front_ends = {name: cluster.front_end_named(name) for name in FRONT_ENDS}
    for name, job in running.front_ends.items():
        job.wait_for("Serving demo at", served[name] + 1)
        until(lambda name=name: cluster.metric(name, "moe_lora:controller_up"), lambda: "no controller")
        assert cluster.over(name, of_loaded(REQUESTS)).answers() == expected
        assert cluster.version(name, LOADED) == version
