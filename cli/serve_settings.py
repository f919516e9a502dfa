# SPDX-License-Identifier: Apache-2.0
"""The options of `moe-lora serve` over its file."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_lora.config.settings import Setting, check_section, settings_of
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.request import is_base_name, name_problem

from .options import sections_of

if TYPE_CHECKING:
    from moe_lora.config import EngineConfig
    from moe_lora.config.cluster import ClusterConfig

logger = logging.getLogger(__name__)

ENVIRONMENT_KEY = "VLLM_API_KEY"


def cluster_to_serve(
    config_file: str | None, front_end: str | None, options: dict[str, Any]
) -> ClusterConfig:
    """The cluster to serve; options not given are None or empty.

    front_end: of several, the owner of host, port and admin_address.  Raises ConfigError, click.UsageError
    and click.BadParameter.
    """
    from moe_lora.config.cluster import SECTIONS, cluster_of, read_cluster, read_content

    options = dict(options)  # a reload reads the options again
    content: dict[str, Any] = {}
    of_file: dict[str, Any] = {}
    folder, path_of = Path(), str
    if config_file is not None:
        # Errors of the file name the file.
        of_file = vars(read_cluster(config_file, scales=True).front_end)
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
    if options["served_model_name"]:
        content["served_model_name"] = list(options["served_model_name"])
    sections = sections_of(options, SECTIONS, absolute=config_file is not None)
    _add_settings(sections, options["further_settings"], path_of)
    front_ends = content.get("front_ends") or {}
    if front_end in front_ends:
        shared = sections.get("front_end", {})
        where = {name: shared.pop(name) for name in ("host", "port", "admin_address") if name in shared}
        content["front_ends"] = {**front_ends, front_end: {**front_ends[front_end], **where}}
    elif front_ends:  # a repeated value of front_end follows the options
        content["front_ends"] = {
            name: {field: value for field, value in place.items() if value != of_file.get(field)}
            for name, place in front_ends.items()
        }
    for section, given in sections.items():
        content[section] = _laid_over(SECTIONS[section], content.get(section), given)
    if keys := options["given_keys"] or _keys_of_environment(content):
        access = content.get("front_end") or {}
        digests = [*access.get("admin_key_digests", ()), *admin_digests(keys)]
        content["front_end"] = {**access, "admin_key_digests": digests}
    modules = [one for text in options["lora_modules"] for one in read_module(text, _base_names(content))]
    adapters = [*modules, *find_adapters(options["lora_dir"])]
    names = [name for name, _ in adapters]
    if len(set(names)) < len(names):
        raise click.UsageError(
            f"adapter names must be unique, not {', '.join(names)}; --lora-modules gives others"
        )
    content["adapters"] = {
        **(content.get("adapters") or {}),
        **{name: _path_or_address(path, path_of, content) for name, path in adapters},
    }
    return cluster_of(content, folder, scales=True)


def fetched(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster, with folders in place of addresses.  Raises ConfigError."""
    if not cluster.has_addresses:
        return cluster
    from moe_lora.adapters.sources import with_local_adapters

    return with_local_adapters(cluster)


def _add_settings(
    sections: dict[str, dict[str, Any]], texts: Iterable[str], path_of: Callable[[str], str]
) -> None:
    """Add --set.  Raises click.UsageError for another value than an option's."""
    given = {section: dict(values) for section, values in sections.items()}
    for section, one, value in map(_setting, texts):
        found, name = one.rule.placed(value, path_of), one.name
        if given.get(section, {}).get(name, found) != found:
            raise click.UsageError(
                f"--set {section}.{name} has another value than {one.rule.option}; give one of them"
            )
        sections.setdefault(section, {})[name] = found


def _path_or_address(path: str, path_of: Callable[[str], str], content: dict[str, Any]) -> str:
    """The path by path_of; an allowed source's address unchanged."""
    sources = content.get("sources")
    if "://" in path or sources is None:
        return path if "://" in path else path_of(path)
    from moe_lora.adapters.sources import hub_address

    return hub_address(path, sources.get("allow") or ()) or path_of(path)


def _laid_over(kind: Any, file: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """A section of the file under the options; another registry drops the file's section."""
    settings, opening = settings_of(kind), kind.OPENED_BY
    if opening and file is None and opening not in given:
        options = ", ".join(settings[name].rule.option or f"{kind.SECTION}.{name}" for name in given)
        raise click.UsageError(f"{options} needs {settings[opening].rule.option}, see its help")
    return given if opening == "folder" and opening in given else {**(file or {}), **given}


def _base_names(content: dict[str, Any]) -> set[str]:
    """Allowed values of base_model_name."""
    served, model_dir = content.get("served_model_name") or [], str(content.get("model_dir") or "")
    return {*([served] if isinstance(served, str) else served), model_dir, Path(model_dir).resolve().name}


def read_module(text: str, base_names: set[str]) -> list[tuple[str, str]]:
    """(name, path) of adapters in --lora-modules: NAME=PATH, or JSON as in vLLM.

    Raises click.BadParameter.
    """
    if text.lstrip()[:1] not in ("{", "["):
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise _bad_module(f"{text!r} is neither NAME=PATH nor JSON with name and path")
        return [_checked_module(name, path)]
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _bad_module(f"{text!r} is not valid JSON ({error}); NAME=PATH works too") from error
    return [_module_of(one, base_names) for one in (content if isinstance(content, list) else [content])]


def _module_of(fields: Any, base_names: set[str]) -> tuple[str, str]:
    """(name, path) of an adapter in JSON."""
    allowed = ("name", "path", "base_model_name", "is_3d_lora_weight")
    if not isinstance(fields, dict) or not set(fields) <= set(allowed):
        raise _bad_module(f"{fields!r} must be an object; allowed fields are {', '.join(allowed)}")
    for field in ("name", "path"):
        if not isinstance(fields.get(field), str) or not fields[field]:
            raise _bad_module(f"{fields!r}: {field} is missing; give a text that is not empty")
    base = fields.get("base_model_name")
    if base is not None and not is_base_name(str(base), base_names):
        served = ", ".join(sorted(base_names))
        raise _bad_module(
            f"{fields['name']}: base_model_name={base!r} is another base model than {served}; give one of "
            "these, leave the field out, or name the base by --served-model-name"
        )
    return _checked_module(fields["name"], fields["path"])


def _checked_module(name: str, path: str) -> tuple[str, str]:
    if problem := name_problem(name):
        raise _bad_module(f"the name {name!r} {problem}")
    return name, _folder_of(path, name)


def _bad_module(problem: str) -> click.BadParameter:
    return click.BadParameter(problem, param_hint="--lora-modules")


def _folder_of(path: str, name: str) -> str:
    from moe_lora.adapters.peft.files import adapter_folder

    try:
        return adapter_folder(path, name)
    except AdapterError as error:
        raise _bad_module(str(error)) from error


def admin_digests(given: Iterable[str]) -> list[str]:
    """Digests of keys.  Raises click.BadParameter for unfit characters."""
    from moe_lora.serve.api_keys import digest_of

    keys = list(dict.fromkeys(given))
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise click.BadParameter(
                "a key must have printable ASCII characters and no blank; leave the option out to serve "
                "without keys",
                param_hint="--api-key or VLLM_API_KEY",
            )
    return [digest_of(key) for key in keys]


def _keys_of_environment(content: dict[str, Any]) -> list[str]:
    """The key in VLLM_API_KEY, unless digests are given."""
    key, section = os.environ.get(ENVIRONMENT_KEY), content.get("front_end")
    if not key or (isinstance(section, dict) and "admin_key_digests" in section):
        return []
    logger.info("an administrator's key is read from %s", ENVIRONMENT_KEY)
    return [key]


def _setting(text: str) -> tuple[str, Setting, Any]:
    """Section, setting and value of --set.  Raises click.BadParameter."""
    from moe_lora.config.cluster import SECTIONS

    place, equals, value = text.partition("=")
    section, _, name = place.partition(".")
    if not equals or section not in SECTIONS:
        raise click.BadParameter(
            f"{text!r} is not SECTION.NAME=VALUE with a section of {', '.join(SECTIONS)}", param_hint="--set"
        )
    settings = settings_of(SECTIONS[section])
    try:
        check_section(SECTIONS[section], section, {name: value})
        found = _value_of(settings[name], value)
        settings[name].read(place, found)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--set") from error
    return section, settings[name], found


def _value_of(one: Setting, text: str) -> Any:
    """A text setting's text, else YAML, by the type: 1e-3 is a number, one value is a list.

    Raises ConfigError for an empty text and for invalid YAML.
    """
    import yaml

    from moe_lora.config.cluster import yaml_value

    if not text:
        raise ConfigError(f"{one.name} has no value; give null for no {one.name}, or omit the setting")
    if tuple[str, ...] in one.kinds and not text.startswith("["):
        return [text]
    if str in one.kinds:
        is_number = int in one.kinds and re.fullmatch(r"-?\d+", text)
        return int(text) if is_number else None if text == "null" else text
    try:
        value = yaml_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not valid YAML: {error}") from error
    if float in one.kinds and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return [value] if tuple[int, ...] in one.kinds and type(value) is int else value


def fit_to_serve(config: EngineConfig, *, skip_bad: bool) -> EngineConfig:
    """The settings, with adapters checked against the base model.

    skip_bad: log and drop bad adapters, after a check of their values too; else bad adapters raise
    ConfigError.  Raises ConfigError for an unreadable base model.
    """
    from moe_lora.adapters.peft.file_check import bad_adapters
    from moe_lora.families import shape_of

    if not config.adapters:
        return config
    shape = shape_of(config.hf_config())
    bad = bad_adapters(
        config.adapters,
        shape,
        values=skip_bad,
        root=config.adapter_root,
        max_lora_rank=config.max_lora_rank,
        base_dir=None if config.load_format == "dummy" else Path(config.model_dir),
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
    """(name, directory) of every PEFT adapter in or below the folders, by name.

    Follows links, and walks each folder once.  An adapter behind a link has the link's name.  Skips
    subfolders with a leading dot.  Raises click.BadParameter for a folder without adapters and for unfit
    names.
    """
    found: list[tuple[str, str]] = []
    unfit: list[str] = []
    for folder in folders:
        here = _adapters_below(folder)
        if not here:
            raise click.BadParameter(_no_adapter(folder), param_hint="--lora-dir")
        for place in here:
            name = Path(os.path.abspath(place)).name
            if problem := name_problem(name):
                unfit.append(f"the folder name {name!r} {problem}")
            found.append((name, place))
    if unfit:
        raise click.BadParameter("; ".join(sorted(unfit)), param_hint="--lora-dir")
    return sorted(found)


def _adapters_below(folder: str) -> list[str]:
    """Adapters in or below a folder, once by name."""
    found: dict[tuple[str, str], str] = {}
    walked: set[str] = set()
    waiting = [folder]
    while waiting:
        place = waiting.pop(0)
        real = os.path.realpath(place)
        if place != folder and _holds(real, os.path.realpath(os.path.dirname(place))):
            continue  # a link upwards
        if os.path.isfile(os.path.join(place, "adapter_config.json")):
            found.setdefault((os.path.basename(os.path.abspath(place)), real), place)
        if real in walked:
            continue
        walked.add(real)
        try:
            names = sorted(os.listdir(place))
        except OSError as error:
            logger.warning("--lora-dir: %s is left out: %s", place, error.strerror)
            continue
        below = (os.path.join(place, name) for name in names if not name.startswith("."))
        waiting += sorted((one for one in below if os.path.isdir(one)), key=os.path.islink)
    return list(found.values())


def _holds(folder: str, path: str) -> bool:
    """True if `path` is, or lies in, the folder, without links."""
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


def _no_adapter(folder: str) -> str:
    """The reason for a folder without adapters."""
    from moe_lora.core.wrong_files import other_content

    found = other_content(Path(folder))
    return f"no adapter_config.json in or below {folder}" + (f"; {found}" if found else "")
