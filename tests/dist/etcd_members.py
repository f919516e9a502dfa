# SPDX-License-Identifier: Apache-2.0
"""Members of an etcd as processes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from moe_lora.dist.cluster.leadership import StoreError
from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore
from tests.patience import PATIENCE_S

from .cluster_jobs import Host, free_port, until


class Members:
    """Members of an etcd.  keys: folder of certificates for their clients.  hosts: of the members."""

    def __init__(
        self, folder: Path, count: int = 3, keys: Path | None = None, hosts: Sequence[Host] = ()
    ) -> None:
        self._folder, self._keys = folder, keys
        self._hosts = hosts or [Host(f"m{number}", "127.0.0.1", folder) for number in range(count)]
        self._scheme = "http" if keys is None else "https"
        self.clients = [f"{host.address}:{free_port()}" for host in self._hosts]
        self._peers = [f"{host.address}:{free_port()}" for host in self._hosts]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(len(self._hosts)):
            self.start(number)

    def start(self, number: int) -> None:
        client, peer = f"{self._scheme}://{self.clients[number]}", f"http://{self._peers[number]}"
        words = [
            *self._hosts[number].prefix,
            "etcd",
            "--name",
            f"m{number}",
            "--data-dir",
            str(self._folder / f"m{number}"),
        ]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        whole = ",".join(f"m{one}=http://{address}" for one, address in enumerate(self._peers))
        words += ["--initial-cluster", whole, "--initial-cluster-state", "new"]
        if self._keys is not None:
            member = str(self._keys / "member.pem")
            words += ["--cert-file", member, "--key-file", member, "--client-cert-auth"]
            words += ["--trusted-ca-file", str(self._keys / "authority.pem")]
        with (self._folder / f"m{number}.log").open("a") as log:
            self.processes[number] = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes.pop(number).wait(PATIENCE_S)

    def stop(self) -> None:
        for number in list(self.processes):
            self.kill(number)


def acquired(store: EtcdStore, holder: str) -> tuple[str, int]:
    """The holder, once a majority is there."""
    found: list[tuple[str, int]] = []

    def ask() -> bool:
        try:
            found.append(store.acquire(holder))
        except StoreError:
            return False
        return True

    until(ask, lambda: "no majority answers")
    return found[0]
