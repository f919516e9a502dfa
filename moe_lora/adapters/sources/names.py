# SPDX-License-Identifier: Apache-2.0
"""A name in, the adapter's folder out: below a folder, or of an organisation on the hub."""

from __future__ import annotations

import os
import re

from moe_lora.adapters.peft.files import CONFIG_FILE
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import AdapterNotFoundError
from moe_lora.core.request import name_problem
from moe_lora.core.wrong_files import confined

from . import AdapterSources

_HUB_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)


def find_folder(name: str, folder: str, root: str | None) -> str:
    """The adapter's folder `folder`/`name`.  root: see `EngineConfig.adapter_root`.

    Raises AdapterNotFoundError, also for a name that leaves the folder.
    """
    path = os.path.join(folder, name)
    if is_below(name) and confined(path, root) and os.path.isfile(os.path.join(path, CONFIG_FILE)):
        return path
    raise _missing(name)


def find_on_hub(name: str, organisation: str, config: SourcesConfig) -> str:
    """The fetched adapter `organisation`/`name`.  Raises as `AdapterSources.local`, AdapterNotFoundError."""
    if not _HUB_PART.fullmatch(name):
        raise _missing(name)
    return AdapterSources(config).local(f"hf://{organisation}/{name}")


def is_below(name: str) -> bool:
    """True if the name is a path without empty parts and parts that start with a dot."""
    return name_problem(name) is None and all(part and part[0] != "." for part in name.split("/"))


def _missing(name: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(f"no adapter {name[:100]!r} is found")
