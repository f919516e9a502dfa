# SPDX-License-Identifier: Apache-2.0
"""cluster.yaml: one file that every role of a cluster reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from moe_lora.core.address import Address, needs_keys, parse_address
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import name_problem

from .devices import LORA_SERVER, Devices, check_devices, instance_names, read_devices, shares_of
from .engine import EngineConfig
from .front_end import (
    CONTROLLER,
    CONTROLLERS,
    ONE_FRONT_END,
    ControllerConfig,
    FrontEndConfig,
    FrontEndPlace,
    LeadershipConfig,
    ProvisionConfig,
    RegistryConfig,
    split_store,
)
from .optional_parts import DLoraConfig, LoraServerConfig, PoolConfig, ScalingConfig, SourcesConfig
from .settings import MISSING, check_names, mapping_of, read_section, settings_of, text_of

SECTIONS: dict[str, Any] = {
    "engine": EngineConfig,
    "lora_server": LoraServerConfig,
    "front_end": FrontEndConfig,
    "controller": ControllerConfig,
    "leadership": LeadershipConfig,
    "provision": ProvisionConfig,
    "pool": PoolConfig,
    "dlora": DLoraConfig,
    "registry": RegistryConfig,
    "sources": SourcesConfig,
    "scaling": ScalingConfig,
}
OF_ENGINE = {"pool", "dlora"}
"""Sections whose settings are fields of `EngineConfig`."""
_FIXED = "fixed"
"""Top of a file that one process writes for another: section → fixed settings (`settings.Rule`)."""
NAMES = (
    *("model_dir", "served_model_name", "adapters", "certificates", "devices", "front_ends", CONTROLLERS),
    *SECTIONS,
)
"""What stands at the top of the file; front_ends are `FrontEndPlace`s and controllers `ControllerConfig`s by
name."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster as its file describes it.

    engine: of every instance; it names no LoRA Server.  other_model_names: of the base model, beside
    served_model_name, which answers and metrics show.  lora_server: without the certificates; None = the
    instances compute deltas.  certificates: folder of those of this cluster's authority (`dist.net.keys`);
    None = all on one host.  provision: how the load on adapters is watched; None = by the defaults where
    there is a LoRA Server, else not at all.  registry: its adapters are served beside those of `engine`; the
    front end opens it.  sources: of fetched adapters; None = none.  front_ends: by name, where there are
    several; what else they need stands in front_end.  scaling: of the number of instances.  controller: the
    process that decides for them; None = the one front end does.  controllers: in its place, by name; the
    leader decides (leadership).  devices: of the ranks on one host, by role.
    """

    engine: EngineConfig
    served_model_name: str
    other_model_names: tuple[str, ...] = ()
    certificates: str | None = None
    lora_server: LoraServerConfig | None = None
    front_end: FrontEndConfig = field(default_factory=FrontEndConfig)
    provision: ProvisionConfig | None = None
    registry: RegistryConfig | None = None
    sources: SourcesConfig | None = None
    scaling: ScalingConfig | None = None
    front_ends: Mapping[str, FrontEndPlace] = field(default_factory=dict)
    controller: ControllerConfig | None = None
    controllers: Mapping[str, ControllerConfig] = field(default_factory=dict)
    leadership: LeadershipConfig | None = None
    devices: Devices = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.provision is not None and self.provision.auto_resize and self.lora_server is None:
            raise ConfigError("provision.auto_resize needs a LoRA Server, whose capacity it changes; add one")
        replace(self.engine, lora_server=self.lora_server)  # which checks them together
        for name in {self.served_model_name, *self.other_model_names} & set(dict(self.engine.adapters)):
            raise ConfigError(
                f"{name!r} names the base model and an adapter; give another "
                "served_model_name (--served-model-name)"
            )
        self._check_places()
        if self.controllers or self.leadership is not None:
            self._check_controllers()
        if self.devices and self.engine.device == "cpu":
            raise ConfigError("devices and engine.device='cpu' do not go together; leave one of them out")
        check_devices(self.devices, self.engine.num_ranks, has_server=self.lora_server is not None)
        if self.front_end.prefill_instances:
            self._check_prefill_instances()
        if self.scaling is not None and self.engine.kv_events is not None:
            from .kv_events import read_settings

            read_settings(self.engine.kv_events, self.scaling.max_instances)
        if self.registry is not None:
            self._check_in_root("registry.folder", self.registry.folder)
        if self.sources is not None:
            self._check_in_root("sources.folder", str(self.sources.place))
            if self.sources.resolver is not None:
                self._check_resolver(self.sources.resolver)

    def _check_prefill_instances(self) -> None:
        server = self.lora_server
        others = {
            "front_end.migration": self.front_end.migration != "off",
            "front_end.placement": self.front_end.placement is not None,
            "sources.resolver": self.has_resolver,
            "instances of several ranks": self.engine.num_ranks > 1,
            "lora_server.device_puts": server is not None and server.device_puts != "none",
        }
        for other, is_set in others.items():
            if is_set:
                raise ConfigError(
                    f"front_end.prefill_instances and {other} do not go together; leave one of them out"
                )
        if self.controllers_at or self.front_end.engines_address is not None:
            return  # other hosts may have further instances
        names, prefill = instance_names(self.engine.num_instances), self.front_end.prefill_instances
        if unknown := sorted(set(prefill) - set(names)):
            raise ConfigError(
                f"front_end.prefill_instances: {unknown[0]!r} is none of {', '.join(names)}; name one of them"
            )
        if set(names) <= set(prefill):
            raise ConfigError(
                "front_end.prefill_instances leaves no instance for answers; start more (--instances), or "
                "name fewer"
            )

    def _check_resolver(self, place: str) -> None:
        """Raises ConfigError for a resolver that other settings exclude."""
        if self.front_end.adapter_chat_template:
            raise ConfigError(
                f"sources.resolver={place} and front_end.adapter_chat_template do not go together: a prompt "
                "becomes tokens before its adapter is found; leave one of them out"
            )
        if place == "registry":
            if self.registry is None:
                raise ConfigError("sources.resolver=registry needs --registry FOLDER; add it")
        elif place.startswith("hf:"):
            if not re.fullmatch(r"hf:[\w-][\w.-]*", place):
                raise ConfigError(
                    f"sources.resolver={place} is no hf:ORG; give an organisation, as hf:my-org"
                )
            if self.sources is not None and not self.sources.allow:
                allow = f"sources.allow=hf://{place[3:]}/*"
                raise ConfigError(f"sources.resolver={place} may fetch nothing; add --set {allow}")
        else:
            self._check_in_root("sources.resolver", place)

    def _check_in_root(self, place: str, folder: str) -> None:
        """Raises ConfigError for a folder outside adapter_root."""
        root = self.engine.adapter_root
        if root is None:
            return
        real = os.path.realpath(root)
        if os.path.commonpath([os.path.realpath(folder), real]) != real:
            raise ConfigError(
                f"{place}={folder} is not in engine.adapter_root={root}, outside of which no adapter is "
                "read; move it there, or give the folder that both are in"
            )

    def _check_places(self) -> None:
        """Raises ConfigError for places that can't be right together."""
        if self.front_ends and not self.controllers_at:
            raise ConfigError(
                "front_ends needs a controller: where each decided by itself, their adapters and placements "
                "would differ; add a controller section with address and engines_address"
            )
        for name in {CONTROLLER, *self.controllers_at} & self.front_ends.keys():
            raise ConfigError(f"front_ends: the name {name!r} is the controller's; give another")
        if self.front_ends and self.front_end.engines_address is not None:
            raise ConfigError(
                "front_end.engines_address and front_ends are both given; give each of front_ends its "
                "engines_address, and in front_end only what they share"
            )
        if len(self.front_ends) > 1 and self.front_end.batch_dir is not None:
            raise ConfigError(
                f"front_end.batch_dir={self.front_end.batch_dir} needs a server with one front end; leave "
                "batch_dir out, and use moe-lora batch --server"
            )
        for name in self.front_ends:
            self.front_end_named(name)
        addresses = {"front_end.engines_address": self.front_end.engines_address}
        for name, one in self.front_ends.items():
            addresses[f"front_ends.{name}.engines_address"] = one.engines_address
        for name, found in self.controllers_at.items():
            addresses |= {f"{name}.address": found.address, f"{name}.engines_address": found.engines_address}
        first: dict[Address, str] = {}
        for place, address in addresses.items():
            if address is not None:
                _check_free(place, address, first.setdefault(parse_address(place, address), place))
        # Administrators' may be alike, on hosts of their own.
        addresses = {
            f"front_ends.{name}.admin_address": one.admin_address for name, one in self.front_ends.items()
        }
        for place, address in {"front_end.admin_address": self.front_end.admin_address, **addresses}.items():
            if address is not None:
                _check_free(place, address, first.get(parse_address(place, address), place))

    def _check_controllers(self) -> None:
        """Raises ConfigError for controllers that no store can choose among."""
        if self.controller is not None or not self.controllers or self.leadership is None:
            raise ConfigError(
                "controllers and leadership go together, in place of controller; give leadership.store, such "
                "as etcd://10.0.0.1:2379, and leave controller out"
            )
        hosts = {parse_address("", one.address).host for one in self.controllers.values()}
        if len(hosts) == 1:
            return
        if split_store("leadership.store", self.leadership.store)[0] == "sqlite":
            raise ConfigError(
                f"leadership.store={self.leadership.store} is a file of one host, and controllers have "
                f"{len(hosts)} hosts; give etcd://HOST:PORT"
            )
        if self.registry is not None:
            raise ConfigError(
                "registry and controllers of several hosts do not go together: a registry is a folder of one "
                "host; give all controllers addresses of one host, or leave registry out"
            )

    @property
    def controllers_at(self) -> dict[str, ControllerConfig]:
        """Addresses of each controller, by its section; empty: the one front end decides."""
        if self.controller is not None:
            return {CONTROLLER: self.controller}
        return {f"{CONTROLLERS}.{name}": place for name, place in self.controllers.items()}

    @property
    def epoch(self) -> int:
        """Of the leader in this process, else 0."""
        return 0 if self.leadership is None else self.leadership.epoch

    @property
    def has_addresses(self) -> bool:
        """True if adapters are still to fetch (`adapters.sources.with_local_adapters`)."""
        return any("://" in path for _, path in self.engine.adapters)

    @property
    def has_resolver(self) -> bool:
        """True if unknown adapters are found at their first request."""
        return self.sources is not None and self.sources.resolver is not None

    @property
    def serves_whole_registry(self) -> bool:
        """True if the registry's adapters are served from the start without a list of names."""
        if self.registry is None or self.registry.adapters is not None:
            return False
        return self.sources is None or self.sources.resolver != "registry"

    @property
    def provisioning(self) -> ProvisionConfig | None:
        """How the load on adapters is watched; None: it is not."""
        return self.provision or (None if self.lora_server is None else ProvisionConfig())

    def instance(self, name: str = "instance-0") -> EngineConfig:
        """Settings of the instance of that name, its LoRA Server where the file says.

        Instances for prompts have adapters of their own.  Raises ConfigError for what a role on another host
        could not find out by itself.
        """
        model = self.engine.performance_model or self.front_end.performance_model
        shares = shares_of(name, self.devices)
        device = "cuda" if shares else self.engine.device
        engine = replace(
            self.engine, instance=name, performance_model=model, device=device, device_shares=shares
        )
        if self.lora_server is None or name in self.front_end.prefill_instances:
            return engine
        for setting, example in (("address", "10.0.0.2:7500"), ("store_dir", "/var/tmp/adapters")):
            if not getattr(self.lora_server, setting):
                raise ConfigError(f"lora_server.{setting} is needed between hosts, such as {example}")
        if self.certificates is None and not self.lora_server.address.startswith("/"):
            raise needs_keys("lora_server.address", self.lora_server.address)
        return replace(engine, lora_server=replace(self.lora_server, certificates=self.certificates))

    def lora_server_rank(self, local_rank: int) -> EngineConfig:
        """Settings of an instance as a rank of the LoRA Server reads them, with its own device of `devices`.

        local_rank: among the ranks of this host.  Raises ConfigError if `devices` lists too few.
        """
        shares = shares_of(LORA_SERVER, self.devices)
        if shares and local_rank >= len(shares):
            raise ConfigError(
                f"devices.{LORA_SERVER} lists {len(shares)} devices, but this is rank {local_rank} of this "
                "host (LOCAL_RANK); list one device for each rank of a host"
            )
        device = "cuda" if shares else self.engine.device
        own = shares[local_rank : local_rank + 1]
        return replace(self.instance(LORA_SERVER), device=device, device_shares=own)

    def engines_address(self) -> str:
        """Where instances dial the one front end in.  Raises ConfigError without one."""
        if self.front_end.engines_address is None:
            raise ConfigError("front_end.engines_address is needed between hosts, such as 10.0.0.1:7600")
        return self.front_end.engines_address

    def front_end_named(self, name: str) -> FrontEndConfig:
        """All settings of one of the front ends; `ONE_FRONT_END` is the name of an only one.

        Raises ConfigError for a name that is not in the file.
        """
        if name in self.front_ends:
            given = vars(self.front_ends[name]).items()
            return replace(self.front_end, **{key: value for key, value in given if value is not None})
        if self.front_ends or name != ONE_FRONT_END:
            names = ", ".join(self.front_ends or (ONE_FRONT_END,))
            raise ConfigError(f"front_ends has none named {name!r}; give one of {names}, or add it")
        return self.front_end

    @property
    def folder_of_sockets(self) -> str | None:
        """Folder of the sockets of a host's roles (`dist.launch.host_roles`), None without sockets."""
        if self.controller is not None:
            address = self.controller.address
        elif self.front_end.engines_address is not None:
            address = self.front_end.engines_address
        else:
            address = "" if self.lora_server is None else self.lora_server.address
        return os.path.dirname(address) if address.startswith("/") else None

    @property
    def on_one_host(self) -> bool:
        """True if instances dial sockets of their host only, and no certificates are given."""
        return self.certificates is None and all(one.path for one in self.dialled_addresses().values())

    def dialled_addresses(self) -> dict[str, Address]:
        """Where everything is that an instance dials, by name: controllers and front ends.

        Raises ConfigError if the file does not say where.
        """
        dialled = {name: one.engines_address for name, one in self.front_ends.items()}
        if not self.front_ends:
            dialled[ONE_FRONT_END] = self.engines_address()
        dialled |= {name: place.engines_address for name, place in self.controllers_at.items()}
        return {name: parse_address("engines_address", address) for name, address in dialled.items()}


def _check_free(place: str, address: str, taken_by: str) -> None:
    if taken_by != place:
        raise ConfigError(f"{place}={address!r} is {taken_by} too; each needs a port of its own")


def read_cluster(path: str | Path, *, scales: bool = False) -> ClusterConfig:
    """The settings in a file; relative paths in it start at the file's own folder.

    scales: as for `cluster_of`.  Raises ConfigError, naming file and field, for anything that can't be right.
    """
    content, path = read_content(path), Path(path)
    try:
        return cluster_of(content, path.resolve().parent, scales=scales)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_content(path: str | Path) -> Any:
    """What a YAML file holds.  Raises ConfigError if it can't be read or is no YAML."""
    try:
        return yaml_value(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node, found = super().compose_mapping_node(anchor), set[str]()
        for name, _ in node.value:
            if (key := f"{name.tag} {name.value}") in found:
                problem = f"the name {name.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
            found.add(key)
        return node


def yaml_value(text: str) -> Any:
    """The text's value.  Raises yaml.YAMLError, also for a repeated name."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def cluster_of(content: Any, folder: Path, *, scales: bool = False) -> ClusterConfig:
    """The cluster that a file's content describes; relative paths start at `folder`.

    scales: `scaling` is allowed.  Raises ConfigError.
    """
    given = dict(mapping_of("the file", content))
    fixed = _read_fixed(given.pop(_FIXED, {}))
    check_names("", given, NAMES)
    model_dir = folder / text_of("model_dir", given.get("model_dir"))
    served_name, *other_names = _served_names(given.get("served_model_name", model_dir.resolve().name))
    if isinstance(number := given.get(CONTROLLERS), int):
        raise ConfigError(
            f"{CONTROLLERS}={number}: a number is for moe-lora cluster manifests alone; give each controller "
            "a name with address and engines_address"
        )
    if given.get("lora_server", {}) is None:
        given = {name: one for name, one in given.items() if name != "lora_server"}
    found = {
        name: {**_section(kind, name, given[name], folder), **_fixed(kind, fixed.get(name, {}))}
        for name, kind in SECTIONS.items()
        if name in given
    }
    if "scaling" in found and not scales:
        raise ConfigError(
            "scaling is for moe-lora serve, cluster up and cluster manifests alone; leave it out"
        )
    adapters = {
        _name("adapters", name): _adapter_place(text_of(f"adapters.{name}", place), folder)
        for name, place in mapping_of("adapters", given.get("adapters")).items()
    }
    engine = {**found.pop("engine", {}), "model_dir": str(model_dir), "adapters": tuple(adapters.items())}
    for name in OF_ENGINE & found.keys():
        engine[name] = SECTIONS[name](**found.pop(name))
    return ClusterConfig(
        engine=EngineConfig(**engine),
        served_model_name=served_name,
        other_model_names=tuple(other_names),
        certificates=str(folder / text_of("certificates", given["certificates"]))
        if "certificates" in given
        else None,
        front_ends=_by_name(FrontEndPlace, "front_ends", given, folder),
        controllers=_by_name(ControllerConfig, CONTROLLERS, given, folder),
        devices=read_devices(given.get("devices")),
        **{name: SECTIONS[name](**values) for name, values in found.items()},
    )


def _by_name(kind: Any, section: str, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings of each role in a section of the file.  Raises ConfigError."""
    return {
        _name(section, name): kind(**_section(kind, f"{section}.{name}", place, folder))
        for name, place in mapping_of(section, given.get(section)).items()
    }


def _adapter_place(text: str, folder: Path) -> str:
    """A path from the folder on; an address unchanged."""
    return text if "://" in text else str(folder / text)


def _read_fixed(given: Any) -> dict[str, dict[str, Any]]:
    """Sections of fixed settings; a section may hold no other settings.  Raises ConfigError."""
    sections = mapping_of(_FIXED, given)
    check_names(_FIXED, sections, SECTIONS)
    found = {name: mapping_of(f"{_FIXED}.{name}", values) for name, values in sections.items()}
    for section, values in found.items():
        known = [name for name, one in settings_of(SECTIONS[section]).items() if one.rule.fixed]
        check_names(f"{_FIXED}.{section}", values, known)
    return found


def _fixed(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed settings of a class, as `cluster_text` writes them."""
    return {name: settings_of(kind)[name].read(name, value) for name, value in given.items()}


def _served_names(given: Any) -> list[str]:
    """Names of the base model: a text, or a list of texts without doubles.  Raises ConfigError."""
    names = given if isinstance(given, list) and given else [given]
    return list(dict.fromkeys(text_of("served_model_name", name) for name in names))


def _section(kind: Any, section: str, given: Any, folder: Path) -> dict[str, Any]:
    """Keyword arguments of a settings class.  Raises ConfigError, also for what is missing."""
    values = read_section(kind, section, given)
    for name, one in settings_of(kind).items():
        if one.default is MISSING and one.rule.in_file and not values.get(name):
            example = "a folder" if one.rule.path else "host:port, such as 10.0.0.1:7600"
            example = "a whole number" if one.kinds == (int,) else example
            raise ConfigError(f"{section}.{name} is missing; give {example}")
        if name in values:
            values[name] = one.rule.placed(values[name], lambda path: str(folder / path))
    return values


def _name(section: str, name: Any) -> str:
    is_text = isinstance(name, str)
    if problem := name_problem(name) if is_text else "is no text; put it in quotes":
        raise ConfigError(f"{section}: the name {name!r} {problem}")
    return str(name)


def cluster_text(cluster: ClusterConfig) -> str:
    """What `read_cluster` reads as the same settings from anywhere on this host."""
    sections = {name: getattr(cluster.engine if name in OF_ENGINE else cluster, name) for name in SECTIONS}
    content = {
        "model_dir": os.path.abspath(cluster.engine.model_dir),
        "served_model_name": [cluster.served_model_name, *cluster.other_model_names]
        if cluster.other_model_names
        else cluster.served_model_name,
        "adapters": {name: _adapter_place(path, Path.cwd()) for name, path in cluster.engine.adapters},
        "certificates": None if cluster.certificates is None else os.path.abspath(cluster.certificates),
        "devices": {role: list(numbers) for role, numbers in cluster.devices.items()},
        "front_ends": {name: _plain(place) for name, place in cluster.front_ends.items()},
        CONTROLLERS: {name: _plain(place) for name, place in cluster.controllers.items()},
        **{name: _plain(settings) for name, settings in sections.items() if settings is not None},
        _FIXED: {
            name: found
            for name, settings in sections.items()
            if settings is not None and (found := _plain(settings, fixed=True))
        }
        or None,
    }
    return yaml.safe_dump(
        {name: value for name, value in content.items() if value is not None}, sort_keys=False
    )


def _plain(settings: Any, *, fixed: bool = False) -> dict[str, Any]:
    """The settings that a file may hold, as YAML has them; fixed: those others that are not the default."""
    found, kind = {}, settings.__class__
    for name, one in settings_of(kind).items():
        value = getattr(settings, name)
        left_out = not one.rule.fixed or value == one.default if fixed else not one.rule.in_file
        if value is None or left_out:
            continue
        value = one.rule.placed(value, os.path.abspath)
        found[name] = (
            _plain(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        )
    return found
