# SPDX-License-Identifier: Apache-2.0
"""A cluster as a job of Slurm: the script, and a Slurm of three nodes on this host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from moe_lora.cli.cluster import cluster as cluster_command
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.slurm import Job, job_text
from tests.dist.cluster_jobs import (
    ADAPTERS,
    DEMO,
    Drive,
    Host,
    free_port,
    local_answers,
    make_requests,
    until,
)
from tests.dist.launch.slurm_nodes import PROGRAMS, SlurmNodes

CONTENT: dict[str, Any] = {
    "model_dir": str(DEMO / "model"),
    "served_model_name": "demo",
    "adapters": {name: str(DEMO / "adapters" / name) for name in ADAPTERS},
    "engine": {"num_instances": 2, "dtype": "float32", "eager": True, "num_threads": 1, "device": "cpu"},
    "lora_server": {"layout": "EP2-PP1", "capacity": 4},
}
JOB = Job(folder="/shared")


def steps(content: dict[str, Any]) -> list[str]:
    text = job_text(content, JOB)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    before, _, rest = text.partition("srun ")
    assert "unset SLURM_GPUS SLURM_GPUS_PER_NODE" in before  # else the first step takes all
    return [line for line in rest.splitlines() if line.startswith("srun --ntasks") and "rm -rf" not in line]


def test_ranks_and_instances_are_tasks_with_their_cores():
    server, instances = steps(CONTENT)
    assert server.startswith("srun --ntasks 2 --cpus-per-task 1 --relative 0 --exact")
    assert instances.startswith("srun --ntasks 2 --cpus-per-task 1 --exact")


def test_tasks_have_the_gpus_of_their_ranks():
    engine = {"num_instances": 4, "expert_parallel": 2, "num_threads": 8}
    server, instances = steps({**CONTENT, "engine": engine})
    assert "--ntasks 2 --cpus-per-task 1 --gpus-per-task 1 " in server
    assert "--ntasks 4 --cpus-per-task 8 --gpus-per-task 2 " in instances


def test_the_file_in_the_script_is_that_of_the_roles(tmp_path):
    content = {**CONTENT, "model_dir": "/models/it's $HOME `id` \\1"}
    text = job_text(content, JOB)
    found = yaml.safe_load(text.partition("'END_OF_CLUSTER_FILE'\n")[2].partition("END_OF_CLUSTER_FILE")[0])
    assert found["model_dir"] == content["model_dir"]
    assert found["front_end"]["engines_address"] == "head.invalid:7600"
    assert found["lora_server"]["address"] == "head.invalid:7500"
    assert found["engine"]["state_dir"] == "/tmp/moe-lora-state-job-id.invalid"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_dir": "models/base"}, "give the absolute path on the nodes"),
        ({"certificates": "/srv"}, "certificates follows from the job"),
        ({"scaling": {"max_instances": 4}}, "scaling has no meaning for Slurm"),
        ({"engine": {"device": "cpu"}}, "give their number as engine.num_threads"),
        ({"lora_server": {"layout": "EP2", "transport": "shm"}}, "shm joins processes of one host"),
    ],
)
def test_a_file_that_no_job_could_use_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        job_text({**CONTENT, **change}, JOB)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "a b"}, "name='a b': give letters"),
        ({"folder": "here"}, "--folder='here': give an absolute path"),
        ({"state_dir": "/tmp/$HOME"}, "--state-dir='/tmp/\\$HOME': give an absolute path"),
    ],
)
def test_names_that_a_shell_would_change_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        job_text(CONTENT, Job(**{"folder": "/shared", **given}))


@pytest.fixture
def nodes() -> Iterator[SlurmNodes]:
    if os.getuid() or not all(
        shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in PROGRAMS
    ):
        pytest.skip("needs root and the packages slurmctld, slurmd, slurm-client and munge")
    found = SlurmNodes(3)
    yield found
    found.stop()


def processes(text: str) -> dict[int, str]:
    """Command lines with a text, by process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
        if text in words:
            found[int(entry.name)] = words
    return found


@pytest.mark.slow
def test_a_job_answers_outlives_killed_roles_and_ends_whole(nodes: SlurmNodes) -> None:
    port, folder = free_port(), nodes.folder
    file, script, log = folder / "cluster.yaml", folder / "job.sbatch", folder / "job.log"
    file.write_text(yaml.safe_dump({**CONTENT, "front_end": {"routing": "round_robin", "port": port}}))
    words = ["sbatch", str(file), "--folder", str(folder), "--state-dir", str(folder)]
    made = CliRunner().invoke(cluster_command, words)
    assert made.exit_code == 0, made.output
    script.write_text(made.output)
    job = nodes.run("sbatch", "--nodes", "3", "--output", str(log), str(script)).split()[-1]
    mine = f"{folder}/moe-lora-{job}"

    def role(name: str) -> int:
        return next((pid for pid, one in processes(mine).items() if name in one and "bash" not in one), 0)

    url = f"http://127.0.0.1:{port}"
    requests = make_requests(16)
    bodies = [
        {"model": model or "demo", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        for model, prompt in requests
    ]
    host = Host("client", "127.0.0.1", folder)

    def drive() -> Drive:
        given = [{**body, "return_token_ids": True} for body in bodies]
        return Drive(host, {"url": url, "bodies": given, "pause_s": 0.2})

    def is_whole() -> bool:
        done = subprocess.run(
            ["curl", "-s", f"{url}/v1/instances"], capture_output=True, text=True, check=False
        )
        return done.stdout.count('"live":true') == 2

    until(is_whole, log.read_text)
    assert drive().answers() == local_answers(requests)
    for name in ("instance-1", "lora-server"):
        under_way = drive()
        killed = role(name)
        os.kill(killed, signal.SIGKILL)
        assert under_way.answers() == local_answers(requests)
        until(lambda name=name, killed=killed: role(name) not in (0, killed) and is_whole(), log.read_text)
    os.kill(role("serve"), signal.SIGKILL)
    until(is_whole, log.read_text)
    assert drive().answers() == local_answers(requests)
    nodes.run("scancel", "--batch", "--signal", "TERM", job)
    until(lambda: not nodes.run("squeue", "-h"), log.read_text)
    until(lambda: not processes(mine), lambda: str(processes(mine)))
    assert {one.name for one in Path(mine).iterdir()} == {"certificates", "cluster.yaml"}
    assert not [*folder.glob("moe-lora-state-*")]
