# SPDX-License-Identifier: Apache-2.0
"""The parts of a cluster over several hosts, and the file of its roles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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

LORA_SERVER = "lora-server"
PORTS = {"engines": 7600, "controller": 7700, "controller_engines": 7701, "lora_server": 7500}
_LISTENS = {FRONT_END: ("engines",), CONTROLLER: ("controller", "controller_engines")}
_MAX_CONTROLLERS = 64
_RELATIVE = "/moe_lora/-"
_OF_FILE = _RELATIVE + 15 * "/-"
"""Start of relative paths, below which `..` stays."""
_MADE_HERE = (
    ("certificates",),
    ("devices",),
    ("front_ends",),
    ("controller",),
    ("controllers",),
    ("leadership",),
    ("front_end", "engines_address"),
    ("front_end", "host"),
    ("lora_server", "address"),
    ("lora_server", "store_dir"),
    ("engine", "state_dir"),
    ("pool", "host"),
)
"""Settings with values from the hosts."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Processes of a role.

    num_gpus, num_cores: of a process; None: every core.
    """

    role: str
    count: int
    num_gpus: int = 0
    num_cores: int | None = None

    def options(self, index: str) -> tuple[str, ...]:
        """Options of a process's command."""
        named = self.role == INSTANCE or (self.role in (FRONT_END, CONTROLLER) and self.count > 1)
        return ("--role", self.role, *(("--name", f"{self.role}-{index}") if named else ()))

    def ports(self, number: int) -> list[int]:
        """Ports for dialling roles."""
        if self.role == LORA_SERVER:
            return [PORTS["lora_server"]] if number == 0 else []
        return [PORTS[name] for name in _LISTENS.get(self.role, ())]

    def environment(self, index: str) -> dict[str, str]:
        """Variables of a process: a rank's place in the LoRA Server."""
        if self.role != LORA_SERVER:
            return {}
        return {"RANK": index, "LOCAL_RANK": "0", "WORLD_SIZE": str(self.count)}


def parts_of(cluster: ClusterConfig, num_front_ends: int, num_controllers: int = 1) -> list[Part]:
    """The parts of a cluster, clients' first.  The ranks of an instance share a host."""
    engine = cluster.engine
    on_gpu = engine.device != "cpu"
    parts = [Part(role=FRONT_END, count=num_front_ends)]
    if num_front_ends > 1:
        parts.append(Part(role=CONTROLLER, count=num_controllers))
    if cluster.lora_server is not None:
        ranks = Layout.parse(cluster.lora_server.layout).num_ranks
        parts.append(Part(role=LORA_SERVER, count=ranks, num_gpus=1 if on_gpu else 0))
    num_gpus = engine.num_ranks if on_gpu else 0
    instances = engine.num_instances
    parts.append(Part(role=INSTANCE, count=instances, num_gpus=num_gpus, num_cores=engine.num_threads))
    return parts


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Facts of the hosts for the file of the roles.

    source, place: name the hosts in errors.  folder: of the file.  name: role and number -> a process's name
    in the network.  leadership: section for several controllers; None: one at most.
    """

    source: str
    place: str
    folder: str
    certificates: str
    state_dir: str
    num_front_ends: int
    name: Callable[[str, int], str]
    leadership: Mapping[str, Any] | None = None


def roles_file(content: Any, hosts: Hosts) -> tuple[ClusterConfig, dict[str, Any]]:
    """The cluster as given, and the content of the roles' file.

    content: with absolute paths of the hosts and without addresses.  Raises ConfigError.
    """
    given = dict(mapping_of("the file", content))
    num_controllers = 1 if hosts.leadership is None else _num_controllers(given, hosts.num_front_ends)
    for setting in _MADE_HERE:
        found: Any = given
        for name in setting:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            raise ConfigError(f"{'.'.join(setting)} follows from {hosts.source}; leave the setting out")
    cluster = cluster_of(given, Path(_OF_FILE), scales=True)
    given.pop("scaling", None)
    for place, path in _relative(yaml.safe_load(cluster_text(cluster))):
        raise ConfigError(f"{place}: {path} is a relative path; give the absolute path {hosts.place}")
    _check(cluster)
    engine = {**(given.get("engine") or {}), "state_dir": hosts.state_dir}
    engine.pop("num_instances", None)
    front_end = {**(given.get("front_end") or {}), "host": "0.0.0.0"}
    given |= {"engine": engine, "certificates": hosts.certificates, "front_end": front_end}
    places = {
        f"{FRONT_END}-{number}": f"{hosts.name(FRONT_END, number)}:{PORTS['engines']}"
        for number in range(hosts.num_front_ends)
    }
    if len(places) == 1:
        front_end["engines_address"] = places[f"{FRONT_END}-0"]
    else:
        given["front_ends"] = {name: {"engines_address": place} for name, place in places.items()}
        controllers = {
            f"{CONTROLLER}-{number}": {
                "address": f"{hosts.name(CONTROLLER, number)}:{PORTS['controller']}",
                "engines_address": f"{hosts.name(CONTROLLER, number)}:{PORTS['controller_engines']}",
            }
            for number in range(num_controllers)
        }
        if len(controllers) == 1:
            given["controller"] = controllers[f"{CONTROLLER}-0"]
        else:
            given |= {"controllers": controllers, "leadership": hosts.leadership}
    if cluster.lora_server is not None:
        address = f"{hosts.name(LORA_SERVER, 0)}:{PORTS['lora_server']}"
        server = _between_hosts("lora_server", given["lora_server"])
        given["lora_server"] = {**server, "address": address, "store_dir": f"{hosts.state_dir}/store"}
    if cluster.engine.pool is not None:
        given["pool"] = _between_hosts("pool", given["pool"])
    cluster_of(given, Path(hosts.folder))
    return cluster, given


def _num_controllers(given: dict[str, Any], num_front_ends: int) -> int:
    """Remove and return the number of controllers, 1 without one.  Raises ConfigError."""
    number = given.pop("controllers", None)
    if number is None:
        return 1
    if type(number) is not int or not 1 <= number <= _MAX_CONTROLLERS:
        raise ConfigError(f"controllers={number!r}: give a number from 1 to {_MAX_CONTROLLERS}")
    if number > 1 and num_front_ends == 1:
        raise ConfigError(f"controllers={number} needs several front ends; give --front-ends 2 or more")
    if number > 1 and given.get("registry") is not None:
        raise ConfigError(
            f"controllers={number} and registry do not go together: a registry is a folder of one host; give "
            "controllers: 1, or leave registry out"
        )
    return number


def _check(cluster: ClusterConfig) -> None:
    """Raises ConfigError for settings without a meaning between hosts."""
    check_instances(cluster)
    front_end, server = cluster.front_end, cluster.lora_server
    ports = {"front_end.port": front_end.port}
    if front_end.admin_address is not None and not front_end.admin_address.startswith("/"):
        ports["front_end.admin_address"] = parse_address("", front_end.admin_address).port
    for setting, port in ports.items():
        if port in PORTS.values() or port < 1024:
            raise ConfigError(
                f"{setting} has port {port}; give one from 1024 on, but not "
                + ", ".join(map(str, PORTS.values()))
            )
    if server is not None and server.device_puts != "none":
        raise ConfigError("lora_server.device_puts joins processes of one host; leave device_puts out")
    if cluster.engine.host_cores:
        raise ConfigError("engine.host_cores names cores of a host; leave host_cores out")
    if cluster.scaling is not None:
        for name in ("admin_address", "prefill_instances"):
            if getattr(front_end, name):
                raise ConfigError(
                    f"scaling and front_end.{name} do not go together: scaling reads /metrics at "
                    "front_end.port, of instances that are all alike; leave one of them out"
                )
        fewest = replace(cluster.engine, num_instances=cluster.scaling.min_instances)
        check_instances(replace(cluster, engine=fewest))


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
    elif isinstance(value, str) and value.startswith(_RELATIVE):
        yield place, os.path.relpath(value, _OF_FILE)
