# SPDX-License-Identifier: Apache-2.0
"""The roles of a cluster as Kubernetes objects: a StatefulSet a role, with stable names as addresses.

Field names are those of the Kubernetes API, 1.28 or later (label `apps.kubernetes.io/pod-index`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_lora.config.cluster import ClusterConfig, cluster_of, cluster_text
from moe_lora.config.settings import mapping_of
from moe_lora.core.address import parse_address
from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout

from .cluster_file import check_instances
from .host_roles import CONTROLLER, FRONT_END, INSTANCE

CONFIG, CERTIFICATES, STATE = "/srv/moe_lora/config", "/srv/moe_lora/certificates", "/srv/moe_lora/state"
"""Folders of a pod: the cluster's file, the Secret of certificates, files of the pod's lifetime."""
LORA_SERVER = "lora-server"
_OF_FILE = f"{CONFIG}/{'-/' * 16}"
"""Start of relative paths, below which `..` stays."""
_PORTS = {"engines": 7600, "controller": 7700, "controller_engines": 7701, "lora_server": 7500}
_USER = 1000
_NAME, _MAX_NAME = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?"), 40
_STARTED = f"{STATE}/started"
"""What an instance or a rank of the LoRA Server says of its start."""
_UNREAD_S = 5
"""Time from the end of a pod to the last new client."""
_STOP_S = 30
"""Time of a role to end, beside a front end's drain."""
_MADE_HERE = (
    ("certificates",),
    ("devices",),
    ("front_ends",),
    ("controller",),
    ("front_end", "engines_address"),
    ("front_end", "host"),
    ("lora_server", "address"),
    ("lora_server", "store_dir"),
    ("engine", "state_dir"),
    ("pool", "host"),
)
"""Settings with values from the pods."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Common facts of a cluster's pods.

    name: begins the names of objects.  claims, secrets: name -> absolute path in every pod, of volumes and of
    Secrets.  domain: of the Kubernetes cluster.  Raises ConfigError.
    """

    image: str
    name: str = "moe-lora"
    namespace: str = "default"
    domain: str = "cluster.local"
    num_front_ends: int = 1
    claims: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, name in (("name", self.name), ("namespace", self.namespace)):
            if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
                raise ConfigError(
                    f"{kind}={name!r} is no name for Kubernetes; give at most {_MAX_NAME} of a-z, 0-9 and "
                    "-, beginning with a letter"
                )
        taken = dict.fromkeys((CONFIG, CERTIFICATES, STATE, "/tmp", "/dev/shm"), "this program")
        for name, path in [*self.claims.items(), *self.secrets.items()]:
            if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
                raise ConfigError(f"{name}={path}: give an absolute folder of the pods, such as /srv/models")
            for other, owner in taken.items():
                if os.path.commonpath([path, other]) in (path, other):
                    raise ConfigError(
                        f"{name}={path} and {other} (of {owner}) contain each other; give another folder"
                    )
            taken[path] = name

    def host(self, role: str, number: int) -> str:
        """Name of a pod in the network, for its successors too."""
        service = f"{self.name}-{role}"
        return f"{service}-{number}.{service}.{self.namespace}.svc.{self.domain}"


class _Plain(yaml.SafeDumper):
    """Without references; texts of several lines in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def manifests_text(content: Any, pods: Pods) -> str:
    """`manifests` as YAML."""
    return yaml.dump_all(manifests(content, pods), Dumper=_Plain, sort_keys=False, width=1000)


def manifests(content: Any, pods: Pods) -> list[dict[str, Any]]:
    """Objects of a cluster, in the order of creation.

    content: of a cluster's file, with absolute paths of the pods and without addresses.  Raises ConfigError.
    """
    cluster, text = _in_pods(content, pods)
    engine, front_end = cluster.engine, cluster.front_end
    on_gpu, digest = engine.device != "cpu", hashlib.sha256(text.encode()).hexdigest()[:10]
    made = [*_shared(pods, digest, text, front_end.port)]
    roles = [(FRONT_END, pods.num_front_ends, _front_end(pods, cluster))]
    if pods.num_front_ends > 1:
        roles.append((CONTROLLER, 1, {"command": _served(CONTROLLER)}))
    if cluster.lora_server is not None:
        ranks = Layout.parse(cluster.lora_server.layout).num_ranks
        roles.append((LORA_SERVER, ranks, _server_rank(ranks, on_gpu=on_gpu)))
    instance = _instance(engine.num_ranks, on_gpu, engine.num_threads)
    roles.append((INSTANCE, engine.num_instances, instance))
    for role, replicas, container in roles:
        grace_s = _STOP_S + (_UNREAD_S + int(front_end.drain_s) if role == FRONT_END else 0)
        made += _of_role(pods, role, replicas, _pod(pods, role, container, grace_s, digest))
    return made


def _in_pods(content: Any, pods: Pods) -> tuple[ClusterConfig, str]:
    """The cluster as given, and its file in the pods."""
    given = dict(mapping_of("the file", content))
    for place in _MADE_HERE:
        found: Any = given
        for name in place:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            raise ConfigError(f"{'.'.join(place)} follows from the pods; leave the setting out")
    cluster = cluster_of(given, Path(_OF_FILE))
    for setting, path in _relative(yaml.safe_load(cluster_text(cluster))):
        raise ConfigError(f"{setting}: {path} is a relative path; give the absolute path in the pods")
    _check(cluster)
    engine = {**(given.get("engine") or {}), "state_dir": STATE}
    engine.pop("num_instances", None)
    front_end = {**(given.get("front_end") or {}), "host": "0.0.0.0"}
    given |= {"engine": engine, "certificates": CERTIFICATES, "front_end": front_end}
    places = {
        f"{FRONT_END}-{number}": f"{pods.host(FRONT_END, number)}:{_PORTS['engines']}"
        for number in range(pods.num_front_ends)
    }
    if len(places) == 1:
        front_end["engines_address"] = places[f"{FRONT_END}-0"]
    else:
        host = pods.host(CONTROLLER, 0)
        given["front_ends"] = {name: {"engines_address": place} for name, place in places.items()}
        given["controller"] = {
            "address": f"{host}:{_PORTS['controller']}",
            "engines_address": f"{host}:{_PORTS['controller_engines']}",
        }
    if cluster.lora_server is not None:
        address = f"{pods.host(LORA_SERVER, 0)}:{_PORTS['lora_server']}"
        server = _between_hosts("lora_server", given["lora_server"])
        given["lora_server"] = {**server, "address": address, "store_dir": f"{STATE}/store"}
    if cluster.engine.pool is not None:
        given["pool"] = _between_hosts("pool", given["pool"])
    cluster_of(given, Path(CONFIG))
    return cluster, yaml.safe_dump(given, sort_keys=False, width=1000)


def _check(cluster: ClusterConfig) -> None:
    """Raises ConfigError for settings without a meaning in pods."""
    check_instances(cluster)
    front_end, server = cluster.front_end, cluster.lora_server
    ports = {"front_end.port": front_end.port}
    if front_end.admin_address is not None and not front_end.admin_address.startswith("/"):
        ports["front_end.admin_address"] = parse_address("", front_end.admin_address).port
    for setting, port in ports.items():
        if port in _PORTS.values() or port < 1024:
            raise ConfigError(
                f"{setting} has port {port}; give one from 1024 on, but not "
                + ", ".join(map(str, _PORTS.values()))
            )
    if server is not None and server.device_puts != "none":
        raise ConfigError("lora_server.device_puts joins processes of one host; leave device_puts out")
    if cluster.engine.host_cores:
        raise ConfigError("engine.host_cores names cores of a host; leave host_cores out")


def _between_hosts(section: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A section, with a transport of several hosts.  Raises ConfigError."""
    found = {"transport": "gloo", **(given or {})}
    if found["transport"] == "shm":
        raise ConfigError(
            f"{section}.transport=shm joins processes of one host; leave transport out for gloo"
        )
    return found


def _relative(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Names and paths of settings below the file's folder."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _relative(one, f"{place}.{name}" if place else str(name))
    elif isinstance(value, str) and value.startswith(f"{CONFIG}/-"):
        yield place, os.path.relpath(value, _OF_FILE)


def _shared(pods: Pods, digest: str, text: str, port: int) -> Iterator[dict[str, Any]]:
    """File, account, the Service for clients, and rules of access."""
    yield _object("v1", "ServiceAccount", pods, "", automountServiceAccountToken=False)
    # Named by its content: pods of a roll-out and of its undoing read their own.
    yield _object("v1", "ConfigMap", pods, f"-{digest}", data={"cluster.yaml": text})
    http = {"name": "http", "port": port, "targetPort": "http"}
    yield _object("v1", "Service", pods, "", spec={"selector": _labels(pods, FRONT_END), "ports": [http]})
    own, clients = {"podSelector": {"matchLabels": _labels(pods)}}, {"matchLabels": _labels(pods, FRONT_END)}
    for part, selector, rule in (
        ("", own["podSelector"], {"from": [own]}),
        ("-http", clients, {"ports": [{"port": "http"}]}),
    ):
        spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
        yield _object("networking.k8s.io/v1", "NetworkPolicy", pods, part, spec=spec)


def _front_end(pods: Pods, cluster: ClusterConfig) -> dict[str, Any]:
    """HTTP, with probes of the process and of readiness."""
    named = ("--name", f"{FRONT_END}-$(INDEX)") if pods.num_front_ends > 1 else ()
    scheme = "HTTP" if cluster.front_end.tls_cert is None else "HTTPS"

    def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
        get = {"path": path, "port": "http", "scheme": scheme}
        return {
            "httpGet": get,
            "periodSeconds": period_s,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        "command": [*_served(FRONT_END), *named],
        "ports": [{"name": "http", "containerPort": cluster.front_end.port}],
        "startupProbe": probe("/live", 2, 150),
        "livenessProbe": probe("/live", 10, 3),
        "readinessProbe": probe("/ready", 2, 1),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNREAD_S)]}}},
    }


def _served(role: str) -> list[str]:
    return ["moe-lora", "serve", "--config", f"{CONFIG}/cluster.yaml", "--role", role]


def _ran(role: str, *options: str) -> dict[str, Any]:
    """A role without HTTP: ready once it has told its start."""
    module = ("python3", "-m", "moe_lora.dist.launch.run_role", "--config", f"{CONFIG}/cluster.yaml")
    told = f'exec 9> {_STARTED} && exec "$@" --status-fd 9'
    return {
        "command": ["sh", "-c", told, "sh", *module, "--role", role, *options],
        "readinessProbe": {"exec": {"command": ["test", "-s", _STARTED]}, "periodSeconds": 2},
    }


def _server_rank(num_ranks: int, *, on_gpu: bool) -> dict[str, Any]:
    """A rank of the LoRA Server: a pod, a GPU."""
    numbers = (("LOCAL_RANK", "0"), ("WORLD_SIZE", str(num_ranks)))
    environment = [{"name": name, "value": value} for name, value in numbers]
    return {
        **_ran(LORA_SERVER),
        "env": [_index("RANK"), *environment],
        **_resources(1 if on_gpu else 0, None),
    }


def _instance(num_ranks: int, on_gpu: bool, num_threads: int | None) -> dict[str, Any]:
    """An instance with the ranks of one host."""
    command = _ran(INSTANCE, "--name", f"{INSTANCE}-$(INDEX)")
    return {**command, **_resources(num_ranks if on_gpu else 0, num_threads)}


def _resources(num_gpus: int, num_cores: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if num_gpus:
        found["limits"] = {"nvidia.com/gpu": str(num_gpus)}
    if num_cores:
        found["requests"] = {"cpu": str(num_cores)}
    return {"resources": found} if found else {}


def _index(name: str) -> dict[str, Any]:
    path = "metadata.labels['apps.kubernetes.io/pod-index']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _of_role(pods: Pods, role: str, replicas: int, pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Headless Service, StatefulSet, and with several pods the bound on voluntary ends."""
    selector = {"matchLabels": _labels(pods, role)}
    # Roles meet before readiness, and NAT would break the data path.
    network = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(pods, role)}
    yield _object("v1", "Service", pods, f"-{role}", spec=network)
    template = {"metadata": {"labels": _labels(pods, role)}, "spec": pod}
    yield _object(
        "apps/v1",
        "StatefulSet",
        pods,
        f"-{role}",
        spec={
            "serviceName": f"{pods.name}-{role}",
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": selector,
            "template": template,
        },
    )
    if replicas > 1:
        bound = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", pods, f"-{role}", spec=bound)


def _pod(pods: Pods, role: str, container: Mapping[str, Any], grace_s: int, digest: str) -> dict[str, Any]:
    volumes = {
        "config": (CONFIG, {"configMap": {"name": f"{pods.name}-{digest}"}}),
        "certificates": (CERTIFICATES, _secret(f"{pods.name}-certificates")),
        "state": (STATE, {"emptyDir": {}}),
        "temporary": ("/tmp", {"emptyDir": {}}),
        "shared-memory": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        **{
            f"claim-{number}": (path, {"persistentVolumeClaim": {"claimName": name}})
            for number, (name, path) in enumerate(pods.claims.items())
        },
        **{
            f"secret-{number}": (path, _secret(name))
            for number, (name, path) in enumerate(pods.secrets.items())
        },
    }
    # An image without this user has no folder for caches.
    own = {"HOME": STATE, "USER": "moe_lora", "XDG_CACHE_HOME": f"{STATE}/cache"}
    environment = [{"name": name, "value": value} for name, value in own.items()]
    whole = {
        "name": role,
        "image": pods.image,
        **container,
        "env": [_index("INDEX"), *environment, *container.get("env", ())],
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "serviceAccountName": pods.name,
        "terminationGracePeriodSeconds": grace_s,
        # The first process of a namespace would ignore SIGTERM until a handler is set.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_place(pods, role),
        "containers": [whole],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


def _place(pods: Pods, role: str) -> dict[str, Any]:
    """Instances and front ends spread over hosts; ranks of the LoRA Server are near instances."""
    host = "kubernetes.io/hostname"
    if role == LORA_SERVER:
        near = {"labelSelector": {"matchLabels": _labels(pods, INSTANCE)}, "topologyKey": host}
        wish = {"weight": 100, "podAffinityTerm": near}
        return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}}
    spread = {
        "maxSkew": 1,
        "topologyKey": host,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(pods, role)},
    }
    return {"topologySpreadConstraints": [spread]}


def _secret(name: str) -> dict[str, Any]:
    return {"secret": {"secretName": name, "defaultMode": 0o440}}


def _labels(pods: Pods, role: str | None = None) -> dict[str, str]:
    component = {} if role is None else {"app.kubernetes.io/component": role}
    return {"app.kubernetes.io/name": "moe-lora", "app.kubernetes.io/instance": pods.name, **component}


def _object(version: str, kind: str, pods: Pods, part: str, **rest: Any) -> dict[str, Any]:
    metadata = {"name": f"{pods.name}{part}", "namespace": pods.namespace, "labels": _labels(pods)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}
