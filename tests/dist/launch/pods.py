# SPDX-License-Identifier: Apache-2.0
"""Runs the pods of Kubernetes objects on this machine: a network namespace and own mounts for each.

In the places of a kubelet and of DNS.  Each pod has its address under its stable name, its volumes at their
places, a read-only root, no other environment than stated, and its probes over HTTP.  Users and resources of
a pod are not followed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.dist.api_server import ApiServer
from tests.dist.cluster_jobs import ROOT, Job, until
from tests.dist.namespaces import Network

_API = "api-server"
_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
_MOUNT = """set -e
mount -t tmpfs tmpfs /srv
last=
for pair in $MOUNTS; do
    place=${pair%%=*} source=${pair#*=}
    if [ $place = /tmp ]; then last=$source; continue; fi
    if [ $source = memory ]; then mount -t tmpfs tmpfs $place; continue; fi
    mkdir -p $place
    mount --bind $source $place
done
unset MOUNTS
if [ -n "$ACCOUNT" ]; then
    mount -t tmpfs tmpfs /run
    mkdir -p /run/secrets/kubernetes.io/serviceaccount
    mount --bind $ACCOUNT /run/secrets/kubernetes.io/serviceaccount
    mount -o remount,ro /run
fi
unset ACCOUNT
mount --bind $last /tmp
mount -o remount,bind,ro /
exec "$@"
"""


class Pod:
    """One container, as its StatefulSet says.  address: in the network."""

    def __init__(self, stated: Mapping[str, Any], number: int, volumes: Mapping[str, Path]) -> None:
        spec = stated["spec"]["template"]["spec"]
        [self.container] = spec["containers"]
        self.service = stated["spec"]["serviceName"]
        self.name = f"{stated['metadata']['name']}-{number}"
        self.host = f"{self.name}.{self.service}.{stated['metadata']['namespace']}.svc.cluster.local"
        self.grace_s = spec["terminationGracePeriodSeconds"]
        self.account = spec["serviceAccountName"] if spec.get("automountServiceAccountToken") else None
        self.environment = {
            one["name"]: one.get("value") or str(number)
            for one in self.container["env"]
            if "value" in one or one["valueFrom"]["fieldRef"]["fieldPath"] == _INDEX
        }
        self.command = [
            word.replace("$(INDEX)", self.environment["INDEX"]) for word in self.container["command"]
        ]
        self.sources = {one["name"]: one for one in spec["volumes"]}
        self.volumes = volumes
        self.job: Job | None = None

    def mounts(self, folder: Path) -> str:
        """Place=source of each volume."""
        found = []
        for one in self.container["volumeMounts"]:
            name, place = one["name"], one["mountPath"]
            source: Path | str = self.volumes.get(name) or folder / name
            if self.sources[name].get("emptyDir", {}).get("medium") == "Memory":
                source = "memory"
            else:
                Path(source).mkdir(parents=True, exist_ok=True)
            found.append(f"{place}={source}")
        return " ".join(found)


class Pods:
    """All pods of some objects.  claims: folder of each PersistentVolumeClaim and Secret.

    api: the API server, on a host of its own, for pods with a service account's token.
    """

    def __init__(
        self, objects: Sequence[Mapping[str, Any]], folder: Path, claims: Mapping[str, Path]
    ) -> None:
        """Raises `namespaces.Unavailable` where this machine can't."""
        self._folder = folder
        self.api: ApiServer | None = None
        files = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
        self.pods: dict[str, Pod] = {}
        for one in objects:
            if one["kind"] == "StatefulSet":
                volumes = {
                    volume["name"]: self._source(volume, files, claims)
                    for volume in one["spec"]["template"]["spec"]["volumes"]
                    if "emptyDir" not in volume
                }
                for number in range(one["spec"]["replicas"]):
                    pod = Pod(one, number, volumes)
                    self.pods[pod.name] = pod
        accounts = [pod.account for pod in self.pods.values() if pod.account is not None]
        self.network = Network([*self.pods, *([_API] if accounts else [])], folder)
        if accounts:
            rules = [rule for one in objects if one["kind"] == "Role" for rule in one["rules"]]
            self.api = ApiServer(folder / _API, self.network.hosts[_API].address, rules)

    def _source(
        self, volume: Mapping[str, Any], files: Mapping[str, Mapping[str, str]], claims: Mapping[str, Path]
    ) -> Path:
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            place = self._folder / "config" / name
            place.mkdir(parents=True, exist_ok=True)
            for file, text in files[name].items():
                (place / file).write_text(text)
            return place
        if "secret" in volume:
            return claims[volume["secret"]["secretName"]]
        return claims[volume["persistentVolumeClaim"]["claimName"]]

    def __enter__(self) -> Pods:
        self.network.__enter__()
        names = [f"{self.network.hosts[name].address} {pod.host}" for name, pod in self.pods.items()]
        for name in self.pods:
            place = self._hosts_file(name)
            place.parent.mkdir(parents=True)
            place.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        if self.api is not None:
            with self.network.entered(_API):
                self.api.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for pod in reversed(self.pods.values()):
                if pod.job is not None and pod.job.process.poll() is None:
                    pod.job.stop()
        finally:
            if self.api is not None:
                self.api.stop()
            for name in self.pods:
                shutil.rmtree(self._hosts_file(name).parent, ignore_errors=True)
            self.network.__exit__()

    def move(self, name: str) -> None:
        """Another node: a new address under the same name."""
        before = self.network.hosts[name].address
        after = self.network.move(name)
        for one in self.pods:
            place = self._hosts_file(one)  # in place: the file is mounted
            place.write_text(place.read_text().replace(f"{before} ", f"{after} "))

    def _hosts_file(self, name: str) -> Path:
        """`ip netns exec` shows this file as /etc/hosts."""
        namespace = self.network.hosts[name].prefix[-1]
        return Path("/etc/netns") / namespace / "hosts"

    def start(self, *names: str) -> None:
        """Start containers, of all pods by default."""
        for name in names or self.pods:
            pod, host = self.pods[name], self.network.hosts[name]
            host.folder.mkdir(parents=True, exist_ok=True)
            paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
            environment = {
                **pod.environment,
                "PATH": paths,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "MOUNTS": pod.mounts(host.folder / "volumes"),
            }
            if self.api is not None:
                account = "" if pod.account is None else str(self.api.account(name))
                environment |= {**self.api.environment, "ACCOUNT": account}
            pod.job = Job(
                host,
                name,
                ["sh", "-c", _MOUNT, "sh", *pod.command],
                python=False,
                environment=environment,
            )

    def delete(self, name: str) -> int:
        """What the end of a pod does: its preStop, then SIGTERM; the exit code within the grace period."""
        pod = self.pods[name]
        assert pod.job is not None
        stop = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if stop:
            subprocess.run(stop, check=True)
        pod.job.process.terminate()
        return int(pod.job.process.wait(pod.grace_s))

    def probed(self, name: str, probe: str) -> bool:
        """Does a probe pass?"""
        job, stated = self.pods[name].job, self.pods[name].container[probe]
        if "exec" in stated:
            assert job is not None
            own = f"--mount=/proc/{job.process.pid}/ns/mnt"
            words = ["nsenter", own, *stated["exec"]["command"]]
            return subprocess.run(words, check=False).returncode == 0
        get = self.pods[name].container[probe]["httpGet"]
        ports = {one["name"]: one["containerPort"] for one in self.pods[name].container["ports"]}
        url = (
            f"{get['scheme'].lower()}://{self.network.hosts[name].address}:{ports[get['port']]}{get['path']}"
        )
        code = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=60)"
        words = [*self.network.hosts[name].prefix, sys.executable, "-c", code, url]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def wait_for(self, name: str, probe: str) -> None:
        def passed() -> bool:
            for one in self.pods.values():
                job = one.job
                assert job is None or job.process.poll() is None, f"{one.name}: {job.log.read_text()}"
            return self.probed(name, probe)

        until(passed, lambda: f"{probe} of {name}")
