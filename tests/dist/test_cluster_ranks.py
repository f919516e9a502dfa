# SPDX-License-Identifier: Apache-2.0
"""An instance of two ranks that one torchrun starts."""

from __future__ import annotations

import os
import signal

import pytest

from tests.patience import PATIENCE_S

from .cluster_jobs import Cluster, Host, local_answers, make_requests, until

pytestmark = pytest.mark.slow
REQUESTS = make_requests(16)


def test_ranks_of_a_torchrun_job_are_one_instance_and_end_together(tmp_path):
    expected = local_answers(REQUESTS)
    roles = ("front-end", "lora-server", "instance-1")
    hosts = {role: Host(role, "127.0.0.1", tmp_path / role) for role in roles}
    cluster = Cluster(hosts, transport="gloo", expert_parallel=2, num_threads=2, num_instances=1)
    try:
        front_end, lora_server = cluster.front_end(), cluster.lora_server()
        instance = cluster.instance("instance-1", num_ranks=2)
        front_end.wait_for("instance instance-1 dialled in")
        assert cluster.answers(REQUESTS) == expected
        assert lora_server.count("instance instance-1 joined") == 1
        follower = max(instance.workers())
        os.kill(follower, signal.SIGKILL)
        until(lambda: front_end.count("instance instance-1 left"), lambda: "rank 0 goes on alone")
        assert instance.process.wait(PATIENCE_S) != 0
    finally:
        cluster.stop()
