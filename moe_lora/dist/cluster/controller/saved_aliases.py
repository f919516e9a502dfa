# SPDX-License-Identifier: Apache-2.0
"""Aliases in a registry, for the next start."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import DecodeError

from moe_lora.core.errors import AdapterError, AdapterNotFoundError, MoeLoraError
from moe_lora.core.request import version_name
from moe_lora.dist.cluster.aliases import targets
from moe_lora.dist.cluster.rollouts import VERSION
from moe_lora.dist.net.codec import Decoder, encode
from moe_lora.engine.client.messages import Alias

if TYPE_CHECKING:
    from moe_lora.adapters.registry.registry import Registry

    from .served_registry import ServedRegistry

logger = logging.getLogger(__name__)
_VERSION = re.compile(f"(.+)@{VERSION.pattern}", re.DOTALL)
"""Names as of `version_name`."""
_decode = Decoder(Alias)


def save(served: ServedRegistry, name: str, alias: Alias, paths: Mapping[str, str]) -> bool:
    """Keep the alias, or forget a removed alias.  False if a later start lacks some of its adapters.

    `loaded` keeps the registry's versions of plainly named adapters: a later start may serve another version.
    The saved number is one less: a living instance's alias, with pins, is later.  Raises RegistryError.
    """
    registry = served.registry
    versions = {one: _version_of(registry, one, paths.get(one)) for one in targets(alias)}
    kept = replace(alias, loaded=(*filter(None, versions.values()),), pinned=(), number=alias.number - 1)
    registry.save_alias(served.base_hash, name, encode(kept) if alias.current else None)
    return all(
        version or one in served.named or _is_version(registry, one) for one, version in versions.items()
    )


def _is_version(registry: Registry, adapter: str) -> bool:
    """True for the name of a registry's version."""
    found = _VERSION.fullmatch(adapter)
    with suppress(AdapterNotFoundError):
        return found is not None and bool(registry.get(found[1], int(found[2])))
    return False


def _version_of(registry: Registry, adapter: str, path: str | None) -> str:
    """The name of the adapter's version in this folder, or ""."""
    with suppress(AdapterNotFoundError):
        for one in registry.versions(adapter):
            if path is not None and Path(one.path) == Path(path):
                return version_name(adapter, one.version)
    return ""


class SavedAliases:
    """A base model's aliases in a registry, with their adapters.

    served: folders of the start's adapters, by name.  path_of: a registry version's folder.  adapters:
    further adapters for the start.
    """

    def __init__(
        self, served: Mapping[str, str], bases: Collection[str], path_of: Callable[[str, int], str]
    ) -> None:
        self._served, self._bases, self._path_of = served, bases, path_of
        self.aliases: dict[str, Alias] = {}
        self.adapters: dict[str, str] = {}

    def load(self, found: dict[str, bytes]) -> None:
        """Add aliases; log an alias without its adapter, and settle one without its second."""
        for name, text in found.items():
            before = set(self.adapters)
            try:
                if name in self._bases:
                    raise AdapterError("the base model has its name")
                alias: Alias = _decode(text)
                alias = replace(alias, current=self._add(alias.current, alias.loaded))
            except (MoeLoraError, DecodeError) as error:
                logger.error("alias %s is left out; roll out again: %s", name, error)
                continue
            try:
                alias = replace(alias, second=self._add(alias.second, alias.loaded))
            except MoeLoraError as error:
                logger.error("alias %s has %s alone: %s", name, alias.current, error)
                alias = replace(alias, second="", share=0.0, stage="settled")
            self.aliases[name] = replace(alias, loaded=tuple(sorted(self.adapters.keys() - before)))

    def _add(self, adapter: str, versions: Sequence[str]) -> str:
        """The adapter's name now.  Raises AdapterError or AdapterNotFoundError."""
        kept = next((one for one in versions if one.rpartition("@v")[0] == adapter), adapter)
        if not adapter or kept in self._served or kept in self.adapters:
            return kept
        version = _VERSION.fullmatch(kept)
        if version is None:
            raise AdapterError(f"adapter {adapter!r} is neither loaded at the start nor a registry's version")
        path = self._path_of(version[1], int(version[2]))
        if self._served.get(adapter) == path:
            return adapter
        self.adapters[kept] = path
        return kept
