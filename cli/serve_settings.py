"""The options of `moe-lora serve`, laid over the settings of its file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config.settings import settings_of
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.request import name_problem

from .setting_options import sections_of

if TYPE_CHECKING:
    from moe_lora.config import EngineConfig
    from moe_lora.config.cluster import ClusterConfig

logger = logging.getLogger(__name__)


def cluster_to_serve(
    config_file: str | None, front_end: str | None, options: dict[str, Any]
) -> ClusterConfig:
    """What to serve.  Options that were not given are None, or empty.

    front_end: which of several front ends host, port and admin_address are of.  Raises ConfigError,
    click.UsageError and click.BadParameter.
    """
    from moe_lora.config.cluster import SECTIONS, cluster_of, read_cluster, read_content

    content: dict[str, Any] = {}
    folder, path_of = Path(), str
    if config_file is not None:
        read_cluster(config_file)  # so that what is wrong in the file is said of the file
        content, folder, path_of = (
            read_content(config_file),
            Path(config_file).resolve().parent,
            os.path.abspath,
        )
    elif options["model_dir"] is None:
        raise click.UsageError("give MODEL_DIR, or --config with a file that names one")
    if options["model_dir"] is not None:
        content["model_dir"] = path_of(options["model_dir"])
        content.pop("served_model_name", None)
    if options["served_model_name"] is not None:
        content["served_model_name"] = options["served_model_name"]
    sections = sections_of(options, SECTIONS, absolute=config_file is not None)
    front_ends = content.get("front_ends") or {}
    if front_end in front_ends:
        shared = sections.get("front_end", {})
        where = {name: shared.pop(name) for name in ("host", "port", "admin_address") if name in shared}
        content["front_ends"] = {**front_ends, front_end: {**front_ends[front_end], **where}}
    for section, given in sections.items():
        content[section] = _laid_over(SECTIONS[section], content.get(section), given)
    adapters = [*map(_named_path, options["lora_modules"]), *find_adapters(options["lora_dir"])]
    names = [name for name, _ in adapters]
    if len(set(names)) < len(names):
        raise click.UsageError(
            f"adapter names must be unique, not {', '.join(names)}; --lora-modules gives others"
        )
    content["adapters"] = {
        **(content.get("adapters") or {}),
        **{name: path_of(path) for name, path in adapters},
    }
    return cluster_of(content, folder)


def _laid_over(kind: Any, file: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """A section of the file with the options over it; another registry takes nothing of the file's."""
    settings, opening = settings_of(kind), kind.OPENED_BY
    if opening and file is None and opening not in given:
        options = ", ".join(settings[name].rule.option for name in given)
        raise click.UsageError(f"{options} needs {settings[opening].rule.option}, see its help")
    if opening == "folder" and opening in given:
        return given
    return {**(file or {}), **given}


def _named_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        raise click.BadParameter(f"{text!r} is not NAME=PATH", param_hint="--lora-modules")
    if problem := name_problem(name):
        raise click.BadParameter(f"the name {name!r} {problem}", param_hint="--lora-modules")
    return name, _folder_of(path, name)


def _folder_of(path: str, name: str) -> str:
    from moe_lora.adapters.peft.files import adapter_folder

    try:
        return adapter_folder(path, name)
    except AdapterError as error:
        raise click.BadParameter(str(error), param_hint="--lora-modules") from error


def fit_to_serve(config: EngineConfig, *, skip_bad: bool) -> EngineConfig:
    """The settings, their adapters held against the base model before anything starts.

    skip_bad: leave out those that can't be served, with a line in the log for each; their values are looked
    at too then.  Raises ConfigError that names all of them otherwise, or for a base model that can't be read.
    """
    from moe_lora.adapters.peft.file_check import bad_adapters
    from moe_lora.core.shape import ModelShape

    if not config.adapters:
        return config
    shape = ModelShape.from_hf_config(config.hf_config())
    bad = bad_adapters(
        config.adapters,
        shape,
        values=skip_bad,
        root=config.adapter_root,
        max_lora_rank=config.max_lora_rank,
    )
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

    Raises click.BadParameter for a folder without any and for unfit names.
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
