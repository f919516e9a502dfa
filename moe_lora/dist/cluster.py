"""cluster.yaml: the settings that every role of a cluster reads (fields: docs/cluster.md)."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from moe_lora.core.config import (
    EngineConfig,
    LoraServerConfig,
    PoolConfig,
    ProvisionConfig,
    RegistryConfig,
    RoutingConfig,
)
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import name_problem

_SECTIONS = (
    "model_dir",
    "served_model_name",
    "adapters",
    "registry",
    "key",
    "key_file",
    "engine",
    "lora_server",
    "front_end",
    "provision",
    "pool",
)
_NOT_IN_ENGINE = ("model_dir", "adapters", "lora_server", "instance", "pool")
_MAKE_KEY = 'python -c "import secrets; print(secrets.token_hex(32))" > cluster.key'


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig(RoutingConfig):
    """Where the front end listens: for HTTP, and (engines_address, host:port) for instances that dial in."""

    host: str = "127.0.0.1"
    port: int = 8000
    engines_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"front_end.port={self.port} must be between 0 and 65535")
        if self.engines_address is not None:
            parse_host_port("front_end.engines_address", self.engines_address)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster as its file describes it.

    engine: of every instance; it names no LoRA Server.  lora_server: fields of `LoraServerConfig` but the
    key, None = the instances compute deltas.  key: shared secret of all roles.  provision: how the load on
    adapters is watched; None = by the defaults where there is a LoRA Server, else not at all.
    registry: its adapters are served beside those of `engine`; the front end opens it.
    """

    engine: EngineConfig
    served_model_name: str
    key: str | None = field(default=None, repr=False)
    lora_server: Mapping[str, Any] | None = None
    front_end: FrontEndConfig = FrontEndConfig()
    provision: ProvisionConfig | None = None
    registry: RegistryConfig | None = None

    def __post_init__(self) -> None:
        if self.provision is not None and self.provision.auto_resize and self.lora_server is None:
            raise ConfigError("provision.auto_resize needs a LoRA Server, whose capacity it changes; add one")
        if self.lora_server is not None:
            # Values are checked at once, also where address and store are filled in later.
            server = LoraServerConfig(**{"address": "-", "store_dir": "-", **self.lora_server}, key="-")
            replace(self.engine, lora_server=server)
        for name, _ in self.engine.adapters:
            if name == self.served_model_name:
                raise ConfigError(
                    f"{name!r} names the base model and an adapter; give another served_model_name"
                )

    def secret(self) -> str:
        """The key of a cluster of several hosts.  Raises ConfigError without one."""
        if not self.key:
            raise ConfigError(
                "the roles of a cluster know each other by a secret; give key_file (or key), made by: "
                + _MAKE_KEY
            )
        return self.key

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
        key = self.secret()
        return replace(self.engine, instance=name, lora_server=LoraServerConfig(**server, key=key))

    def engines_address(self) -> str:
        """Where instances dial in.  Raises ConfigError without one."""
        if self.front_end.engines_address is None:
            raise ConfigError("front_end.engines_address is needed between hosts, such as 10.0.0.1:7600")
        return self.front_end.engines_address


def parse_host_port(setting: str, address: str) -> tuple[str, int]:
    """("host", port) of "host:port".  Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{setting}={address!r} is not host:port, such as 10.0.0.1:7600")
    return host, int(port)


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
    given = _mapping("the file", content)
    _check_keys("", given, _SECTIONS)
    model_dir = folder / _text("model_dir", given.get("model_dir"))
    served_name = given.get("served_model_name")
    engine = _fields(EngineConfig, "engine", given.get("engine"), _NOT_IN_ENGINE)
    front_end = _fields(FrontEndConfig, "front_end", given.get("front_end"))
    for name in ("performance_model", "operating_points"):
        if front_end.get(name) is not None:
            front_end[name] = str(folder / front_end[name])
    server = given.get("lora_server")
    if server is not None:
        server = _fields(LoraServerConfig, "lora_server", server, ("key",))
        if "store_dir" in server:
            server["store_dir"] = str(folder / server["store_dir"])
    return ClusterConfig(
        engine=EngineConfig(
            model_dir=str(model_dir),
            adapters=_adapters(given.get("adapters"), folder),
            pool=PoolConfig(**_fields(PoolConfig, "pool", given["pool"])) if "pool" in given else None,
            **engine,
        ),
        served_model_name=model_dir.resolve().name
        if served_name is None
        else _text("served_model_name", served_name),
        key=_key(given, folder),
        lora_server=server,
        front_end=FrontEndConfig(**front_end),
        provision=ProvisionConfig(**_fields(ProvisionConfig, "provision", given["provision"]))
        if "provision" in given
        else None,
        registry=_registry(given["registry"], folder) if "registry" in given else None,
    )


def _registry(given: Any, folder: Path) -> RegistryConfig:
    settings = _mapping("registry", given)
    _check_keys("registry", settings, ("folder", "adapters"))
    names = settings.get("adapters")
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise ConfigError(f"registry.adapters={names!r} must be a list of names, or null for all")
    place = folder / _text("registry.folder", settings.get("folder"))
    return RegistryConfig(folder=str(place), adapters=None if names is None else tuple(names))


def _adapters(given: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    found = []
    for name, place in _mapping("adapters", given).items():
        if problem := name_problem(str(name)):
            raise ConfigError(f"adapters: the name {name!r} {problem}")
        found.append((str(name), str(folder / _text(f"adapters.{name}", place))))
    return tuple(found)


def _key(given: Mapping[str, Any], folder: Path) -> str | None:
    if "key_file" not in given:
        return _text("key", given["key"]) if "key" in given else None
    if "key" in given:
        raise ConfigError("key and key_file are both given; give one")
    path = folder / _text("key_file", given["key_file"])
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key_file={path} can't be read ({error}); make it by: {_MAKE_KEY}") from error
    return _text("key_file", key)


def _fields(kind: type, section: str, given: Any, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keyword arguments of a dataclass, from a section of the file."""
    settings = _mapping(section, given)
    hints = typing.get_type_hints(kind)
    allowed = [one.name for one in fields(kind) if one.name not in left_out]
    _check_keys(section, settings, allowed)
    return {name: _value(f"{section}.{name}", value, hints[name]) for name, value in settings.items()}


def _value(setting: str, value: Any, hint: Any) -> Any:
    """The value as the field's type has it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            if isinstance(value, list) and all(type(item) is int for item in value):
                return tuple(value)
        elif type(value) is kind:
            return value
        elif kind is float and type(value) is int:
            return float(value)
    names = " or ".join(_NAMES.get(kind, "a list of whole numbers") for kind in kinds)
    raise ConfigError(f"{setting}={value!r} must be {names}")


_NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
}


def _mapping(section: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"{section} must be a mapping of names to values, not {type(given).__name__}")
    return given


def _check_keys(section: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for name in given:
        if name not in allowed:
            place = f"{section}.{name}" if section else str(name)
            raise ConfigError(f"{place} is not a setting; allowed are {', '.join(allowed)}")


def _text(setting: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{setting}={value!r} must be a text that is not empty")
    return value
