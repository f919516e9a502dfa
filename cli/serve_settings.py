"""The options of `moe-lora serve`, laid over the settings of its file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.request import name_problem

if TYPE_CHECKING:
    from moe_lora.core.config import EngineConfig, RegistryConfig
    from moe_lora.dist.cluster import ClusterConfig

logger = logging.getLogger(__name__)

_PROVISION_FIELDS = {
    "target_iar": "target_iar",
    "provision_window_s": "window_s",
    "auto_resize": "auto_resize",
}
_SERVER_FIELDS = {
    "lora_capacity": "capacity",
    "lora_server_memory_gb": "memory_gb",
    "transport": "transport",
    "load_gb_per_s": "load_gb_per_s",
}


def _server_options(file: Mapping[str, Any] | None, given: dict[str, Any]) -> Mapping[str, Any] | None:
    """Fields of LoraServerConfig, those of options taken out of `given` and laid over the file's.

    Raises click.UsageError if there is no server to which they belong.
    """
    layout = {"layout": given.pop("lora_server")} if "lora_server" in given else {}
    fields = {field: given.pop(option) for option, field in _SERVER_FIELDS.items() if option in given}
    if file is None and not layout:
        if fields:
            raise click.UsageError(f"{', '.join(fields)}: these need --lora-server, such as EP1-PP1")
        return None
    return {**(file or {}), **layout, **fields}


def settings_of(config_file: str | None, options: dict[str, Any]) -> ClusterConfig:
    """What to serve.  Options that were not given are None, or empty.

    Raises ConfigError, click.UsageError and click.BadParameter.
    """
    from moe_lora.core.config import EngineConfig, PoolConfig, ProvisionConfig
    from moe_lora.dist.cluster import ClusterConfig, read_cluster
    from moe_lora.dist.front_ends import FrontEndConfig

    given = {name: value for name, value in options.items() if value is not None}
    model_dir, name = given.pop("model_dir", None), given.pop("served_model_name", None)
    front_end = {one.name: given.pop(one.name) for one in fields_of(FrontEndConfig) if one.name in given}
    if not front_end["cors_origins"]:
        del front_end["cors_origins"]
    adapters = (*map(_named_path, given.pop("lora_modules")), *find_adapters(given.pop("lora_dir")))
    if given.pop("no_prefix_caching"):
        given["prefix_caching"] = False
    if config_file is not None:
        file = read_cluster(config_file)
    elif model_dir is None:
        raise click.UsageError("give MODEL_DIR, or --config with a file that names one")
    else:
        file = ClusterConfig(engine=EngineConfig(model_dir=model_dir), served_model_name="")
    server = _server_options(file.lora_server, given)
    if "pool_replicas" in given:
        pool = file.engine.pool or PoolConfig()
        given["pool"] = replace(pool, replicas=given.pop("pool_replicas"))
    fields = {field: given.pop(option) for option, field in _PROVISION_FIELDS.items() if option in given}
    registry = _registry_options(file.registry, given)
    provision = replace(file.provision or ProvisionConfig(), **fields) if fields else file.provision
    if model_dir is not None:
        given["model_dir"] = model_dir
        name = name or (Path(model_dir).resolve().name)
    name = name or file.served_model_name
    names = [adapter for adapter, _ in adapters]
    kept = tuple(one for one in file.engine.adapters if one[0] not in names)
    if name in names:
        raise click.UsageError(
            f"{name!r} names the base model and an adapter; give another --served-model-name"
        )
    return replace(
        file,
        engine=replace(file.engine, adapters=kept + adapters, **given),
        served_model_name=name,
        lora_server=server,
        front_end=replace(file.front_end, **front_end),
        provision=provision,
        registry=registry,
    )


def _registry_options(file: RegistryConfig | None, given: dict[str, Any]) -> RegistryConfig | None:
    """The registry of the options, taken out of `given`, or of the file.  Raises click.UsageError."""
    from moe_lora.core.config import RegistryConfig

    folder, names = given.pop("registry", None), tuple(given.pop("registry_adapters"))
    if folder is not None:
        return RegistryConfig(folder=folder, adapters=names or None)
    if names and file is None:
        raise click.UsageError("--registry-adapters needs --registry, where they are registered")
    return replace(file, adapters=names) if names and file is not None else file


def _named_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        raise click.BadParameter(f"{text!r} is not NAME=PATH", param_hint="--lora-modules")
    if problem := name_problem(name):
        raise click.BadParameter(f"the name {name!r} {problem}", param_hint="--lora-modules")
    return name, _folder_of(path, name)


def _folder_of(path: str, name: str) -> str:
    from moe_lora.adapters.peft_files import adapter_folder

    try:
        return adapter_folder(path, name)
    except AdapterError as error:
        raise click.BadParameter(str(error), param_hint="--lora-modules") from error


def fit_to_serve(config: EngineConfig, *, skip_bad: bool) -> EngineConfig:
    """The settings, their adapters held against the base model before anything starts.

    skip_bad: leave out those that can't be served, with a line in the log for each; their values are looked
    at too then.  Raises ConfigError that names all of them otherwise, or for a base model that can't be read.
    """
    from moe_lora.adapters.base_model import model_shape
    from moe_lora.adapters.file_check import bad_adapters

    if not config.adapters:
        return config
    bad = bad_adapters(config.adapters, model_shape(config.model_dir), values=skip_bad)
    if bad and not skip_bad:
        lines = "".join(f"\n  {name}: {problem}" for name, problem in bad.items())
        raise ConfigError(
            f"{len(bad)} of {len(config.adapters)} adapters can't be served; mend them, or go on without "
            f"them by --skip-bad-adapters:{lines}"
        )
    for name, problem in bad.items():
        logger.error("left out: adapter %s: %s", name, problem)
    return replace(config, adapters=tuple(one for one in config.adapters if one[0] not in bad))


def find_adapters(folders: Iterable[str]) -> list[tuple[str, str]]:
    """(name, directory) of every PEFT adapter in or below the folders, sorted by name.

    Raises click.BadParameter for a folder without any and for unfit names; EngineConfig refuses names that
    come twice.
    """
    found: list[tuple[str, str]] = []
    unfit: list[str] = []
    for folder in folders:
        here = [place for place, _, files in os.walk(folder) if "adapter_config.json" in files]
        if not here:
            raise click.BadParameter(f"no adapter_config.json in or below {folder}", param_hint="--lora-dir")
        for place in here:
            name = Path(place).resolve().name
            if problem := name_problem(name):
                unfit.append(f"the folder name {name!r} {problem}")
            found.append((name, place))
    if unfit:
        raise click.BadParameter("; ".join(sorted(unfit)), param_hint="--lora-dir")
    return sorted(found)
