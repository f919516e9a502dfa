# SPDX-License-Identifier: Apache-2.0
"""Two controllers of one host: one leads, by a lease in a file; the other decides once the first is gone."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.patience import PATIENCE_S

from .cluster_jobs import local_answers
from .elected_cluster import ElectedCluster
from .test_control_plane import FRONT_ENDS, REQUESTS, of_loaded

TTL_S = 30.0
"""A busy machine does not end it."""


@pytest.fixture(scope="module")
def elected(tmp_path_factory) -> Iterator[ElectedCluster]:
    folder = tmp_path_factory.mktemp("elected")
    store = f"sqlite://{folder}/lease"
    with ElectedCluster(folder, store, local_answers(REQUESTS), ttl_s=TTL_S) as elected:
        yield elected


def end_lease(elected: ElectedCluster) -> None:
    """As after the lease's time."""
    with closing(sqlite3.connect(elected.store.removeprefix("sqlite://"), timeout=PATIENCE_S)) as file, file:
        file.execute("UPDATE leader SET until_s = 0")


def test_a_standby_decides_after_the_leader_is_killed_under_requests(elected):
    elected.change()
    drives = [elected.cluster.over(name, of_loaded(REQUESTS) * 3) for name in FRONT_ENDS]
    elected.controllers["a"].process.kill()
    elected.controllers["a"].process.wait(PATIENCE_S)
    elected.until_away()
    answer = elected.cluster.load("one", "other")
    assert answer.status_code == 503
    assert "no controller leads" in answer.json()["error"]["message"]
    end_lease(elected)
    elected.until_leads("b", 1)
    elected.until_led("b")
    for drive in drives:
        assert drive.answers() == elected.expected * 3
    assert [elected.epoch(name) for name in FRONT_ENDS] == [2, 2]
    elected.change("two")
    elected.check_served()


def test_a_leader_that_is_told_to_end_gives_the_lease_back(elected):
    elected.start("a")
    assert elected.controllers["a"].count(r"controller b leads \(epoch 2\); a stands by") == 1
    assert elected.controllers["b"].stop() == 0
    assert elected.controllers["b"].count("controller b leads no more") == 1
    elected.until_leads("a", 2)
    elected.until_led("a")
    assert elected.epoch("one") == 3
    elected.change()


def test_a_leader_that_stood_still_for_longer_than_its_lease_decides_nothing(elected):
    elected.start("b")
    stopped = elected.controllers["a"].process
    os.kill(stopped.pid, signal.SIGSTOP)
    end_lease(elected)
    elected.until_leads("b", 2)
    elected.until_led("b")
    assert elected.epoch("one") == 4
    elected.change()
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(PATIENCE_S) in (os.EX_TEMPFAIL, -signal.SIGALRM)
    elected.change("two")
    assert [elected.epoch(name) for name in FRONT_ENDS] == [4, 4]
    elected.start("a")
    elected.check_served()
