# SPDX-License-Identifier: Apache-2.0
"""A Slurm of several nodes on this host, by Debian's packages slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from socket import gethostname

from tests.dist.cluster_jobs import ROOT, alive, free_port, until
from tests.patience import PATIENCE_S

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class SlurmNodes:
    """Nodes n1, n2, ... of 8 processors each."""

    def __init__(self, num_nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.names = [f"n{number}" for number in range(1, num_nodes + 1)]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8"
            for name in self.names
        )
        text = _CONFIG.format(host=gethostname(), port=free_port(), folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "key").chmod(0o400)
        (self.folder / "munge").mkdir(0o700)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_WAIT_POLICY": "passive",
        }
        try:
            munge = self.folder / "munge"
            self.run(
                *("munged", "--force", f"--key-file={self.folder}/key", f"--socket={munge}/socket"),
                *(
                    f"--pid-file={self.folder}/munged.pid",
                    f"--log-file={munge}/log",
                    f"--seed-file={munge}/seed",
                ),
            )
            self.run("slurmctld")
            for name in self.names:
                self.run("slurmd", "-N", name)
            until(lambda: self.run("sinfo", "-h", "-o", "%t") in ("idle", "idle*"), lambda: self.run("sinfo"))
        except BaseException:
            self.stop()
            raise

    def run(self, *words: str) -> str:
        """Output of a command, which must succeed."""
        log = self.folder / "commands.log"  # daemons keep the file open
        with log.open("wb") as file:
            done = subprocess.run(
                words, env=self.environment, stdout=file, stderr=file, timeout=PATIENCE_S, check=False
            )
        assert done.returncode == 0, (words, log.read_text())
        return log.read_text().strip()

    def stop(self) -> None:
        """End jobs and daemons."""
        if (self.folder / "slurmctld.pid").exists():
            self.run("scancel", "--user", "root")
            until(lambda: not self.run("squeue", "-h"), lambda: self.run("squeue"))
        for file in (*self.folder.glob("*.pid"),):
            pid = int(file.read_text())
            os.kill(pid, 15)
            until(lambda pid=pid: not alive(pid), lambda file=file: f"{file} runs")
        shutil.rmtree(self.folder)
