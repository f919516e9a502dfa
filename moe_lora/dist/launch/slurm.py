# SPDX-License-Identifier: Apache-2.0
"""A cluster as a job of Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from moe_lora.core.errors import ConfigError

from .host_roles import FRONT_END
from .topology import LORA_SERVER, Hosts, Part, parts_of, roles_file

_HEAD, _JOB = "head.invalid", "job-id.invalid"
"""The first node and the job, in the file before the job."""
_END = "END_OF_CLUSTER_FILE"
_STOP_S = 30
"""Time for instances and LoRA Server to end."""
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@{grace_s}
# The first node is a single point of failure; a role on another lost node does not start again.
set -u
umask 077
folder={folder}/{name}-$SLURM_JOB_ID
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node --oneliner "$first" | sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/')
mkdir "$folder" && moe-lora cluster init --folder "$folder/certificates" || exit
sed "s/{head}/$address/; s/{job}/$SLURM_JOB_ID/" > "$folder/cluster.yaml" <<'{end}'
{file}{end}
export file=$folder/cluster.yaml
# Else each step takes what the job has.
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_NTASKS SLURM_NTASKS_PER_NODE
srun --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 \\
    bash -c 'mkdir -m 700 {state} || [ -O {state} ]' || exit

# A role that fails starts again, until the job is told to end.
role() {{
    trap 'ended=1' TERM
    until "$@" || [ "${{ended-}}" ]; do sleep 1; done
}}
export -f role
{steps}
steps=$(jobs -p)
front_end=
trap 'ended=1; kill "$front_end"' TERM
until [ "${{ended-}}" ]; do
    moe-lora serve --config "$file" --role front-end & front_end=$!
    wait "$front_end" || wait "$front_end" || sleep 1
done
scancel --signal=TERM "$SLURM_JOB_ID"
for _ in $(seq {stop_s}); do kill -0 $steps || break; sleep 1; done 2> /dev/null
kill $steps 2> /dev/null
wait
srun --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 rm -rf {state}
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Names and folders of a job.  folder: shared by its nodes; state_dir: of each node."""

    name: str = "moe-lora"
    folder: str = "."
    state_dir: str = "/tmp"


def job_text(content: Any, job: Job) -> str:
    """A batch script of a cluster, for sbatch.

    content: of a cluster's file, with absolute paths of the nodes and without addresses.  Raises ConfigError.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", job.name):
        raise ConfigError(f"name={job.name!r}: give letters, digits and .-_, with a letter or digit first")
    for option, path in (("--folder", job.folder), ("--state-dir", job.state_dir)):
        if not re.fullmatch(r"[\w./+-]+", path) or not PurePosixPath(path).is_absolute():
            raise ConfigError(f"{option}={path!r}: give an absolute path of letters, digits and ./+-_")
    state = f"{job.state_dir}/{job.name}-state-{_JOB}"
    hosts = Hosts(
        source="the job",
        place="on the nodes",
        folder=job.folder,
        certificates="certificates",
        state_dir=state,
        num_front_ends=1,
        name=lambda role, number: _HEAD,
    )
    cluster, file = roles_file(content, hosts)
    if cluster.scaling is not None:
        raise ConfigError("scaling has no meaning for Slurm, whose jobs keep their nodes; leave scaling out")
    if cluster.engine.num_threads is None:
        raise ConfigError("Slurm reserves cores for each instance; give their number as engine.num_threads")
    return _SCRIPT.format(
        name=job.name,
        stop_s=_STOP_S,
        grace_s=2 * _STOP_S + int(cluster.front_end.drain_s),
        folder=job.folder,
        head=_HEAD,
        job=_JOB,
        end=_END,
        file=yaml.safe_dump(file, sort_keys=False, width=1000),
        steps="\n".join(_steps(parts_of(cluster, 1))),
        state=state.replace(_JOB, '"$SLURM_JOB_ID"'),
    )


def _steps(parts: list[Part]) -> Iterator[str]:
    for part in parts:
        if part.role == FRONT_END:
            continue
        index = "$SLURM_PROCID"
        words = " ".join(f'"{word}"' for word in part.options(index))
        variables = "".join(f'{name}="{value}" ' for name, value in part.environment(index).items())
        gpus = f" --gpus-per-task {part.num_gpus}" if part.num_gpus else ""
        first = " --relative 0" if part.role == LORA_SERVER else ""
        command = f'python3 -m moe_lora.dist.launch.run_role --config "$file" {words}'
        yield (
            f"srun --ntasks {part.count} --cpus-per-task {part.num_cores or 1}{gpus}{first} --exact --mem 0 "
            f"--no-kill --kill-on-bad-exit=0 \\\n    bash -c '{variables}role {command}' &"
        )
