# SPDX-License-Identifier: Apache-2.0
"""Aliases in a registry, for the next start of a server."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import DecodeError

from moe_lora.core.errors import AdapterError, MoeLoraError
from moe_lora.dist.net.codec import Decoder, encode
from moe_lora.engine.client.messages import Alias

if TYPE_CHECKING:
    from moe_lora.adapters.registry.registry import Registry

logger = logging.getLogger(__name__)
_VERSION = re.compile(r"(.+)@v([1-9]\d{0,8})", re.DOTALL)
_decode = Decoder(Alias)


def save(registry: Registry, base_hash: str, name: str, alias: Alias) -> None:
    """Keep the alias; forget a removed one.  Raises RegistryError.

    The number is one less: the alias of a living instance, with its pins, is later.
    """
    kept = replace(alias, loaded=(), pinned=(), number=alias.number - 1)
    registry.save_alias(base_hash, name, encode(kept) if alias.current else None)


class SavedAliases:
    """The aliases of a base model in a registry, with adapters for them.

    names: of the adapters at the start.  bases: names of the base model.  path_of: the folder of a
    registry's version.  adapters: further adapters for the start, folders by name.
    """

    def __init__(
        self, names: Collection[str], bases: Collection[str], path_of: Callable[[str, int], str]
    ) -> None:
        self._names, self._bases, self._path_of = names, bases, path_of
        self.aliases: dict[str, Alias] = {}
        self.adapters: dict[str, str] = {}

    def load(self, found: dict[str, bytes]) -> None:
        """Add aliases; log each one without its adapter.  Without its second adapter, an alias is settled."""
        for name, text in found.items():
            before = set(self.adapters)
            try:
                if name in self._bases:
                    raise AdapterError("the base model has its name")
                alias: Alias = _decode(text)
                self._add(alias.current)
            except (MoeLoraError, DecodeError) as error:
                logger.error("alias %s is left out; roll out again: %s", name, error)
                continue
            try:
                self._add(alias.second)
            except MoeLoraError as error:
                logger.error("alias %s has %s alone: %s", name, alias.current, error)
                alias = replace(alias, second="", share=0.0, stage="settled")
            self.aliases[name] = replace(alias, loaded=tuple(sorted(self.adapters.keys() - before)))

    def _add(self, adapter: str) -> None:
        """Raises AdapterError or AdapterNotFoundError."""
        if not adapter or adapter in self._names or adapter in self.adapters:
            return
        version = _VERSION.fullmatch(adapter)
        if version is None:
            raise AdapterError(f"adapter {adapter!r} is neither loaded at the start nor a registry's version")
        self.adapters[adapter] = self._path_of(version[1], int(version[2]))
