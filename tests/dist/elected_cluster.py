# SPDX-License-Identifier: Apache-2.0
"""A cluster of processes with two controllers, of which one leads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from .cluster_jobs import Host, Job, until
from .test_control_plane import FRONT_ENDS, REQUESTS, ControlledCluster, of_loaded

CONTROLLERS = ("a", "b")
TTL_S = 5.0
_SAID = r"stands by|leads \(epoch \d+\)\n"


class ElectedCluster:
    """Two controllers, two front ends, two instances.

    expected: answers to `REQUESTS`.  hosts: as for `ControlledCluster`.
    """

    def __init__(
        self,
        folder: Path,
        store: str,
        expected: list[list[int]],
        ttl_s: float = TTL_S,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        leadership = {"store": store, "ttl_s": ttl_s}
        self.cluster = ControlledCluster(folder, CONTROLLERS, leadership, hosts)
        self.store, self.expected = store, expected
        self.controllers: dict[str, Job] = {}

    def __enter__(self) -> ElectedCluster:
        try:
            front_ends = [self.cluster.front_end_named(name) for name in FRONT_ENDS]
            for number in (1, 2):
                self.cluster.plain_instance(f"instance-{number}")
            self.start("a")
            self.until_leads("a", 1)
            self.start("b")
            for job in (self.controllers["a"], *front_ends):
                job.wait_for("instance instance-. dialled in", 2)
            self.until_led("a")
        except BaseException:
            self.cluster.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()

    def start(self, name: str) -> None:
        """Start a controller, until its log says that this controller or another leads."""
        self.controllers[name] = job = self.cluster.controller_named(name)
        job.wait_for(_SAID, job.count(_SAID) + 1)

    def parts(self) -> tuple[str, str]:
        """The leader and the standby; starts an ended one again."""
        for name, job in self.controllers.items():
            if job.process.poll() is not None:
                self.start(name)
        until(lambda: sum(map(self._leads, CONTROLLERS)) == 1, lambda: "no controller leads")
        leader = next(filter(self._leads, CONTROLLERS))
        return leader, next(name for name in CONTROLLERS if name != leader)

    def _leads(self, name: str) -> bool:
        job = self.controllers[name]
        text = job.log.read_text()
        return job.process.poll() is None and text.rfind("the controller begins") > text.rfind("stands by")

    def num_leads(self, name: str) -> int:
        """Times that a controller led so far."""
        return self.controllers[name].count("the controller begins: state")

    def until_leads(self, name: str, times: int) -> None:
        """Until a controller leads for the so manieth time."""
        self.controllers[name].wait_for("the controller begins: state", times)

    def epoch(self, name: str) -> float:
        """Of the leader at a front end."""
        return self.cluster.metric(name, "moe_lora:controller_epoch")

    def until_led(self, controller: str) -> None:
        """Until all front ends have this controller's link."""
        shown = f'moe_lora:controller_epoch{{controller="controllers.{controller}"'

        def led(name: str) -> bool:
            text = httpx.get(f"{self.cluster.urls[name]}/metrics", trust_env=False).text
            return shown in text and bool(self.cluster.metric(name, "moe_lora:controller_up"))

        until(lambda: all(map(led, FRONT_ENDS)), lambda: f"front ends do not follow {controller}")

    def until_away(self) -> None:
        """Until no front end has a controller."""
        until(
            lambda: not any(self.cluster.metric(one, "moe_lora:controller_up") for one in FRONT_ENDS),
            lambda: "a controller leads",
        )

    def check_served(self) -> None:
        """The loaded adapter answers over each front end."""
        for name in FRONT_ENDS:
            assert self.cluster.over(name, of_loaded(REQUESTS)).answers() == self.expected

    def change(self, name: str = "one") -> None:
        """A load over a front end is done at both."""
        before = max((self._version(one) for one in FRONT_ENDS), default=0)
        answer = self.cluster.load(name, load_inplace=True)
        assert answer.status_code == 200, answer.text
        assert [self._version(one) for one in FRONT_ENDS] == [before + 1] * 2

    def _version(self, name: str) -> int:
        cards = httpx.get(f"{self.cluster.urls[name]}/v1/adapters", trust_env=False).json()["data"]
        return next((card["version"] for card in cards if card["id"] == "loaded"), 0)
