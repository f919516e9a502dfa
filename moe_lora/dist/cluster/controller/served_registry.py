"""A registry beside a running server: what of it is served from the start, and calls off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import RegisteredAdapter, Registry
from moe_lora.config import EngineConfig, RegistryConfig
from moe_lora.core.errors import AdapterError, ConfigError

logger = logging.getLogger(__name__)


class ServedRegistry:
    """A registry and the base model that is served, for an event loop: calls run in threads."""

    def __init__(self, registry: Registry, base_hash: str) -> None:
        self.registry = registry
        self.base_hash = base_hash

    async def base(self) -> str:
        """The base model's hash."""
        return self.base_hash

    async def resolve(self, name: str) -> RegisteredAdapter:
        """The current version of `name`, fit to be served.  Raises as `Registry.resolve`."""
        return cast("RegisteredAdapter", await self.call("resolve", name, self.base_hash))

    async def call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """What a method of `Registry` returns."""
        return await asyncio.to_thread(getattr(self.registry, method), *args, **keywords)


@contextmanager
def opened_registry(
    settings: RegistryConfig | None, config: EngineConfig, model_name: str
) -> Iterator[tuple[EngineConfig, ServedRegistry | None]]:
    """The registry, closed with the context, and settings that name what is served of it from the start.

    An adapter with lost or altered files is left out and logged, unless it was named.  Raises AdapterError or
    AdapterNotFoundError for one that was, RegistryError or ConfigError if the registry or the base model
    can't be read, or names collide.
    """
    if settings is None:
        yield config, None
        return
    with Registry(settings.folder) as registry:
        base_hash = base_model_hash(config.model_dir)
        taken = {model_name, *(name for name, _ in config.adapters)}
        found = []
        chosen = settings.adapters
        for name in (
            [one.name for one in registry.adapters(base_hash=base_hash)] if chosen is None else chosen
        ):
            if name in taken:
                raise ConfigError(
                    f"{name!r} of the registry {settings.folder} is also the name of the base model or of an "
                    "adapter given beside it; leave that one out, or choose among the registry's adapters"
                )
            try:
                found.append((name, registry.resolve(name, base_hash).path))
            except AdapterError as error:
                if chosen is not None:
                    raise
                logger.error("left out: %s", error)
        yield replace(config, adapters=(*config.adapters, *found)), ServedRegistry(registry, base_hash)
