# SPDX-License-Identifier: Apache-2.0
"""The roles of a cluster as Kubernetes objects: a StatefulSet a role, with stable names as addresses.

Field names are those of the Kubernetes API, 1.28 or later (label `apps.kubernetes.io/pod-index`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from moe_lora.config import FrontEndConfig
from moe_lora.config.optional_parts import ScalingConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller import ALIVE, READY

from .host_roles import CONTROLLER, FRONT_END, INSTANCE
from .topology import LORA_SERVER, Hosts, Part, parts_of, roles_file

CONFIG, CERTIFICATES, STATE = "/srv/moe_lora/config", "/srv/moe_lora/certificates", "/srv/moe_lora/state"
"""Folders of a pod: the cluster's file, the Secret of certificates, files of the pod's lifetime."""
_INDEX = "$(INDEX)"
"""Number of a pod, in words of its command."""
_USER = 1000
_NAME, _MAX_NAME = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?"), 40
_STARTED = f"{STATE}/started"
"""What an instance or a rank of the LoRA Server says of its start."""
_UNREAD_S = 5
"""Time from the end of a pod to the last new client."""
_PROBED = {ALIVE: f"{STATE}/alive", READY: f"{STATE}/ready"}
"""A controller sets the times of these files."""
_LEASE_S = 7.0
"""Duration of the leader's Lease; a recovery of 2 s follows."""
_STOP_S = 30
"""Time of a role to end, beside a front end's drain."""


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

    content: of a cluster's file, with absolute paths of the pods and without addresses; `controllers` is a
    number.  Raises ConfigError.
    """
    hosts = Hosts(
        source="the pods",
        place="in the pods",
        folder=CONFIG,
        certificates=CERTIFICATES,
        state_dir=STATE,
        num_front_ends=pods.num_front_ends,
        name=pods.host,
        leadership={"store": f"kubernetes://{pods.namespace}/{pods.name}-{CONTROLLER}", "ttl_s": _LEASE_S},
    )
    cluster, file = roles_file(content, hosts)
    for setting in ("ttft_ms", "interval_s"):
        if setting in (content.get("scaling") or ()):
            raise ConfigError(f"scaling.{setting} has no meaning for Kubernetes; leave {setting} out")
    front_end, text = cluster.front_end, yaml.safe_dump(file, sort_keys=False, width=1000)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    made = [*_shared(pods, digest, text, front_end.port)]
    num_controllers = len(file.get("controllers", ())) or 1
    if num_controllers > 1:
        made += _of_leases(pods)
    for part in parts_of(cluster, pods.num_front_ends, num_controllers):
        grace_s = _STOP_S + (_UNREAD_S + int(front_end.drain_s) if part.role == FRONT_END else 0)
        pod = _pod(pods, part.role, _container(part, front_end), grace_s, digest)
        if part.role == CONTROLLER and part.count > 1:
            pod |= {"serviceAccountName": f"{pods.name}-{CONTROLLER}", "automountServiceAccountToken": True}
        scaling = cluster.scaling if part.role == INSTANCE else None
        made += _of_role(pods, part, pod, scaling)
        if scaling is not None:
            made.append(_autoscaler(pods, scaling, cluster.engine.max_num_seqs))
    return made


def _shared(pods: Pods, digest: str, text: str, port: int) -> Iterator[dict[str, Any]]:
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


def _of_leases(pods: Pods) -> Iterator[dict[str, Any]]:
    """Access of the controllers to the Lease of their leader."""
    part, group = f"-{CONTROLLER}", "rbac.authorization.k8s.io"
    name = f"{pods.name}{part}"
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    # A rule for `create` can't name the object.
    rules = [{**leases, "resourceNames": [name], "verbs": ["get", "update"]}, {**leases, "verbs": ["create"]}]
    role = {"apiGroup": group, "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": pods.namespace}]
    yield _object("v1", "ServiceAccount", pods, part, automountServiceAccountToken=False)
    yield _object(f"{group}/v1", "Role", pods, part, rules=rules)
    yield _object(f"{group}/v1", "RoleBinding", pods, part, roleRef=role, subjects=subjects)


def _container(part: Part, front_end: FrontEndConfig) -> dict[str, Any]:
    words = ("--config", f"{CONFIG}/cluster.yaml", *part.options(_INDEX))
    if part.role in (FRONT_END, CONTROLLER):
        command = ["moe-lora", "serve", *words]
        if part.role == CONTROLLER:
            return _of_controller(command)
        return {"command": command, **_of_http(front_end)}
    environment = [
        _index(name) if value == _INDEX else {"name": name, "value": value}
        for name, value in part.environment(_INDEX).items()
    ]
    return {**_ran(words), **({"env": environment} if environment else {}), **_resources(part)}


def _of_http(front_end: FrontEndConfig) -> dict[str, Any]:
    scheme = "HTTP" if front_end.tls_cert is None else "HTTPS"

    def get(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http", "scheme": scheme}}

    return {
        "ports": [{"name": "http", "containerPort": front_end.port}],
        **_probes(live=get("/live"), ready=get("/ready")),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNREAD_S)]}}},
    }


def _of_controller(command: Sequence[str]) -> dict[str, Any]:
    """The leader's event loop, or a standby's campaign, sets the times of files."""

    def recent(variable: str) -> dict[str, Any]:
        return {"exec": {"command": ["sh", "-c", f'test -n "$(find {_PROBED[variable]} -mmin -1)"']}}

    # A former container leaves its files.
    anew = f'rm -f {" ".join(_PROBED.values())}; exec "$@"'
    return {
        "command": ["sh", "-c", anew, "sh", *command],
        "env": [{"name": name, "value": path} for name, path in _PROBED.items()],
        **_probes(live=recent(ALIVE), ready=recent(READY)),
    }


def _probes(live: Mapping[str, Any], ready: Mapping[str, Any]) -> dict[str, Any]:
    def probe(check: Mapping[str, Any], period_s: int, failures: int) -> dict[str, Any]:
        return {**check, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "startupProbe": probe(live, 2, 150),
        "livenessProbe": probe(live, 10, 3),
        "readinessProbe": probe(ready, 2, 1),
    }


def _ran(words: Sequence[str]) -> dict[str, Any]:
    """A role without HTTP: ready once it has told its start."""
    told = f'exec 9> {_STARTED} && exec "$@" --status-fd 9'
    return {
        "command": ["sh", "-c", told, "sh", "python3", "-m", "moe_lora.dist.launch.run_role", *words],
        "readinessProbe": {"exec": {"command": ["test", "-s", _STARTED]}, "periodSeconds": 2},
    }


def _resources(part: Part) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if part.num_gpus:
        found["limits"] = {"nvidia.com/gpu": str(part.num_gpus)}
    if part.num_cores:
        found["requests"] = {"cpu": str(part.num_cores)}
    return {"resources": found} if found else {}


def _index(name: str) -> dict[str, Any]:
    path = "metadata.labels['apps.kubernetes.io/pod-index']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _of_role(
    pods: Pods, part: Part, pod: Mapping[str, Any], scaling: ScalingConfig | None
) -> Iterator[dict[str, Any]]:
    """Headless Service, StatefulSet, and with several pods the bound on voluntary ends."""
    role, most = part.role, part.count if scaling is None else scaling.max_instances
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
            **({"replicas": part.count} if scaling is None else {}),
            "podManagementPolicy": "Parallel",
            "selector": selector,
            "template": template,
        },
    )
    if most > 1:
        bound = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", pods, f"-{role}", spec=bound)


def _autoscaler(pods: Pods, scaling: ScalingConfig, max_num_seqs: int) -> dict[str, Any]:
    """The number of instances by metrics of the Service for clients."""
    service, name = {"apiVersion": "v1", "kind": "Service", "name": pods.name}, f"{pods.name}-{INSTANCE}"

    def metric(value: int, name: str, **labels: str) -> dict[str, Any]:
        selector = {"selector": {"matchLabels": labels}} if labels else {}
        target = {"type": "AverageValue", "averageValue": str(value)}
        found = {"describedObject": service, "metric": {"name": name, **selector}, "target": target}
        return {"type": "Object", "object": found}

    def behavior(kind: str, value: int, pause_s: int, window_s: int) -> dict[str, Any]:
        policy = {"type": kind, "value": value, "periodSeconds": pause_s}
        return {"stabilizationWindowSeconds": window_s, "policies": [policy]}

    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
        "minReplicas": scaling.min_instances,
        "maxReplicas": scaling.max_instances,
        "metrics": [
            metric(scaling.waiting_high, "vllm_num_requests_waiting_by_reason", reason="capacity"),
            metric(max(1, int(scaling.full_share * max_num_seqs)), "vllm_num_requests_running"),
        ],
        "behavior": {
            "scaleUp": behavior("Percent", 100, scaling.add_pause_s, 0),
            "scaleDown": behavior("Pods", 1, scaling.remove_pause_s, scaling.remove_pause_s),
        },
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", pods, f"-{INSTANCE}", spec=spec)


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
