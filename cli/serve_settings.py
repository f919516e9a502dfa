"""The options of `moe-lora serve`, laid over the settings of its file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config.settings import settings_of
from moe_lora.core.request import name_problem

from .setting_options import sections_of

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig


def cluster_to_serve(
    config_file: str | None, front_end: str | None, options: dict[str, Any]
) -> ClusterConfig:
    """What to serve.  Options that were not given are None, or empty.

    front_end: which of several front ends host and port are of.  Raises ConfigError, click.UsageError and
    click.BadParameter.
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
        where = {name: one for name, one in sections.get("front_end", {}).items() if name in ("host", "port")}
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
    return name, path


def find_adapters(folders: Iterable[str]) -> list[tuple[str, str]]:
    """(name, directory) of every PEFT adapter in or below the folders, sorted by name.

    Raises click.BadParameter for a folder without any and for unfit names.
    """
    found: list[tuple[str, str]] = []
    for folder in folders:
        here = [place for place, _, files in os.walk(folder) if "adapter_config.json" in files]
        if not here:
            raise click.BadParameter(f"no adapter_config.json in or below {folder}", param_hint="--lora-dir")
        for place in here:
            name = Path(place).resolve().name
            if problem := name_problem(name):
                raise click.BadParameter(f"the folder name {name!r} {problem}", param_hint="--lora-dir")
            found.append((name, place))
    return sorted(found)
