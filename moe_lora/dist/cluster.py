"""cluster.yaml: the settings that every role of a cluster reads (fields: docs/cluster.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from moe_lora.core.config import (
    EngineConfig,
    LoraServerConfig,
    PoolConfig,
    ProvisionConfig,
    RegistryConfig,
)
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import name_problem
from moe_lora.dist.net.connection import Address, parse_address
from moe_lora.dist.net.keys import Keys, keys_in, needs_keys

from .fields import check_names, dataclass_fields, mapping_of, text_of
from .front_ends import (
    CONTROLLER,
    ONE_FRONT_END,
    ControllerConfig,
    FrontEndConfig,
    FrontEndPlace,
    check_places,
)

_SECTIONS = (
    "model_dir",
    "served_model_name",
    "adapters",
    "registry",
    "certificates",
    "engine",
    "lora_server",
    "front_end",
    "front_ends",
    "controller",
    "provision",
    "pool",
)
NOT_IN_ENGINE = ("model_dir", "adapters", "lora_server", "instance", "pool")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster as its file describes it.

    engine: of every instance; it names no LoRA Server.  lora_server: fields of `LoraServerConfig` but the
    certificates, None = the instances compute deltas.  certificates: folder of those of this cluster's
    authority (`dist.net.keys`), None = all on one host.  provision: how the load on
    adapters is watched; None = by the defaults where there is a LoRA Server, else not at all.
    registry: its adapters are served beside those of `engine`; the front end opens it.
    front_ends: by name, where there are several; what else they need stands in front_end.  controller: the
    process that decides for them; None = the one front end does.
    """

    engine: EngineConfig
    served_model_name: str
    certificates: str | None = None
    lora_server: Mapping[str, Any] | None = None
    front_end: FrontEndConfig = field(default_factory=FrontEndConfig)
    provision: ProvisionConfig | None = None
    registry: RegistryConfig | None = None
    front_ends: Mapping[str, FrontEndPlace] = field(default_factory=dict)
    controller: ControllerConfig | None = None

    def __post_init__(self) -> None:
        if self.provision is not None and self.provision.auto_resize and self.lora_server is None:
            raise ConfigError("provision.auto_resize needs a LoRA Server, whose capacity it changes; add one")
        if self.lora_server is not None:
            # Values are checked at once, also where address and store are filled in later.
            server = LoraServerConfig(**{"address": "-", "store_dir": "-", **self.lora_server})
            replace(self.engine, lora_server=server)
        for name, _ in self.engine.adapters:
            if name == self.served_model_name:
                raise ConfigError(
                    f"{name!r} names the base model and an adapter; give another served_model_name"
                )
        check_places(self.front_end, self.front_ends, self.controller)

    def instance(self, name: str = "instance-0") -> EngineConfig:
        """Settings of the instance of that name, its LoRA Server where the file says.

        Raises ConfigError for what a role on another host could not find out by itself.
        """
        if self.lora_server is None:
            return replace(self.engine, instance=name)
        server = self.lora_server
        for setting, example in (("address", "10.0.0.2:7500"), ("store_dir", "/var/tmp/adapters")):
            if not server.get(setting):
                raise ConfigError(f"lora_server.{setting} is needed between hosts, such as {example}")
        if self.certificates is None and not server["address"].startswith("/"):
            raise needs_keys("lora_server.address", server["address"])
        joined = LoraServerConfig(**server, certificates=self.certificates)
        return replace(self.engine, instance=name, lora_server=joined)

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
            place = self.front_ends[name]
            return replace(
                self.front_end,
                host=self.front_end.host if place.host is None else place.host,
                port=self.front_end.port if place.port is None else place.port,
                engines_address=place.engines_address,
            )
        if self.front_ends or name != ONE_FRONT_END:
            names = ", ".join(self.front_ends or (ONE_FRONT_END,))
            raise ConfigError(f"front_ends has none named {name!r}; give one of {names}, or add it")
        return self.front_end

    def keys(self) -> Keys | None:
        """The certificates by which roles on several hosts know each other; None where all are on one.

        Raises ConfigError if they can't be read, or there are none and an address is one of a network.
        """
        if self.certificates is None:
            for name, address in self.doors().items():
                if not address.path:
                    raise needs_keys(f"{name}.engines_address", address)
        return keys_in(self.certificates)

    @property
    def folder_of_sockets(self) -> str | None:
        """Where roles of one host have their sockets (`one_host`), None if they have none."""
        address = "" if self.controller is None else self.controller.address
        return os.path.dirname(address) if address.startswith("/") else None

    def doors(self) -> dict[str, Address]:
        """Where everything is that an instance dials, by name: the controller and each front end.

        Raises ConfigError if the file does not say where.
        """
        found = {}
        if self.controller is not None:
            found[CONTROLLER] = parse_address(
                f"{CONTROLLER}.engines_address", self.controller.engines_address
            )
        if not self.front_ends:
            found[ONE_FRONT_END] = parse_address("front_end.engines_address", self.engines_address())
        for name, place in self.front_ends.items():
            found[name] = parse_address(f"front_ends.{name}.engines_address", place.engines_address)
        return found


def read_cluster(path: str | Path) -> ClusterConfig:
    """The settings in a file; relative paths in it start at the file's own folder.

    Raises ConfigError, naming file and field, for anything that can't be right.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        return _cluster(content, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _cluster(content: Any, folder: Path) -> ClusterConfig:
    given = mapping_of("the file", content)
    check_names("", given, _SECTIONS)
    model_dir = folder / text_of("model_dir", given.get("model_dir"))
    served_name = given.get("served_model_name")
    engine = dataclass_fields(EngineConfig, "engine", given.get("engine"), NOT_IN_ENGINE)
    front_end = dataclass_fields(FrontEndConfig, "front_end", given.get("front_end"))
    for name in ("performance_model", "operating_points"):
        if front_end.get(name) is not None:
            front_end[name] = str(folder / front_end[name])
    server = given.get("lora_server")
    if server is not None:
        server = dataclass_fields(LoraServerConfig, "lora_server", server, ("certificates",))
        if "store_dir" in server:
            server["store_dir"] = str(folder / server["store_dir"])
    return ClusterConfig(
        engine=EngineConfig(
            model_dir=str(model_dir),
            adapters=_adapters(given.get("adapters"), folder),
            pool=PoolConfig(**dataclass_fields(PoolConfig, "pool", given["pool"]))
            if "pool" in given
            else None,
            **engine,
        ),
        served_model_name=model_dir.resolve().name
        if served_name is None
        else text_of("served_model_name", served_name),
        certificates=str(folder / text_of("certificates", given["certificates"]))
        if "certificates" in given
        else None,
        lora_server=server,
        front_end=FrontEndConfig(**front_end),
        front_ends=_front_ends(given.get("front_ends")),
        controller=ControllerConfig(**_places("controller", ControllerConfig, given["controller"]))
        if "controller" in given
        else None,
        provision=ProvisionConfig(**dataclass_fields(ProvisionConfig, "provision", given["provision"]))
        if "provision" in given
        else None,
        registry=_registry(given["registry"], folder) if "registry" in given else None,
    )


def _front_ends(given: Any) -> dict[str, FrontEndPlace]:
    found = {}
    for name, place in mapping_of("front_ends", given).items():
        if problem := name_problem(str(name)):
            raise ConfigError(f"front_ends: the name {name!r} {problem}")
        found[str(name)] = FrontEndPlace(**_places(f"front_ends.{name}", FrontEndPlace, place))
    return found


def _places(section: str, kind: type, given: Any) -> dict[str, Any]:
    """Keyword arguments of a dataclass whose addresses have to be given."""
    settings = dataclass_fields(kind, section, given)
    for one in fields(kind):
        if one.default is MISSING and one.name not in settings:
            raise ConfigError(f"{section}.{one.name} is missing; give host:port, such as 10.0.0.1:7600")
    return settings


def _registry(given: Any, folder: Path) -> RegistryConfig:
    settings = mapping_of("registry", given)
    check_names("registry", settings, ("folder", "adapters"))
    names = settings.get("adapters")
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise ConfigError(f"registry.adapters={names!r} must be a list of names, or null for all")
    place = folder / text_of("registry.folder", settings.get("folder"))
    return RegistryConfig(folder=str(place), adapters=None if names is None else tuple(names))


def _adapters(given: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    found = []
    for name, place in mapping_of("adapters", given).items():
        if problem := name_problem(str(name)):
            raise ConfigError(f"adapters: the name {name!r} {problem}")
        found.append((str(name), str(folder / text_of(f"adapters.{name}", place))))
    return tuple(found)
