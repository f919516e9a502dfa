# SPDX-License-Identifier: Apache-2.0
"""A registry beside a running server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.records import RegisteredAdapter
from moe_lora.core.request import name_problem
from moe_lora.core.shape import rank_limit, rank_problem
from moe_lora.dist.net.codec import verb
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.client.messages import Alias

if TYPE_CHECKING:
    from moe_lora.adapters.registry.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRegistry:
    """A registry and the served base model's hash.

    optional: adapters unnamed in the settings; unfit ones don't stop the start.  named: by the settings.
    aliases: of an earlier server.
    """

    registry: Registry
    base_hash: str
    root: str | None = None
    max_lora_rank: int | None = None
    optional: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    aliases: Mapping[str, Alias] = field(default_factory=dict)

    def save_alias(self, name: str, alias: Alias, paths: Mapping[str, str]) -> bool:
        """Keep the alias for the next start (`saved_aliases.save`)."""
        from .saved_aliases import save

        return save(self, name, alias, paths)


@contextmanager
def opened_registry(
    cluster: ClusterConfig,
) -> Iterator[tuple[ClusterConfig, ServedRegistry | None]]:
    """Settings with the registry's start adapters, and the registry, closed with the context.

    An unnamed adapter with lost or altered files is left out and logged.  sources.resolver=registry starts
    with named adapters only.  Raises AdapterError or AdapterNotFoundError for an unfit named adapter;
    RegistryError or ConfigError for an unreadable registry or base model, and for name collisions.
    """
    settings, config = cluster.registry, cluster.engine
    if settings is None:
        yield cluster, None
        return
    from moe_lora.adapters.registry.base_model import base_model_hash
    from moe_lora.adapters.registry.registry import Registry

    with Registry(settings.folder) as registry:
        base_hash = base_model_hash(config.model_dir)
        taken = {
            cluster.served_model_name,
            *cluster.other_model_names,
            *(name for name, _ in config.adapters),
        }
        found = []
        found_later = settings.adapters is None and not cluster.serves_whole_registry
        chosen = () if found_later else settings.adapters
        limit = rank_limit(config.max_lora_rank, [config.device])
        for name in (
            [one.name for one in registry.adapters(base_hash=base_hash)] if chosen is None else chosen
        ):
            if name in taken:
                raise ConfigError(
                    f"{name!r} of the registry {settings.folder} is also the name of the base model or of an "
                    "adapter given beside it; leave that one out, or choose among the registry's adapters"
                )
            try:
                if chosen is None and (problem := name_problem(name)):
                    raise AdapterError(f"the name {name!r} {problem}")
                resolved = registry.resolve(name, base_hash)
                if chosen is not None and limit is not None and resolved.lora_rank > limit:
                    raise AdapterError(f"adapter {name!r}: {rank_problem(resolved.lora_rank, limit)}")
                found.append((name, resolved.path))
            except AdapterError as error:
                if chosen is not None:
                    raise
                logger.error("left out: %s", error)
        named = frozenset(name for name, _ in config.adapters)
        config = replace(config, adapters=(*config.adapters, *found))
        optional = frozenset() if chosen is not None else frozenset(name for name, _ in found)
        served = ServedRegistry(
            registry, base_hash, config.adapter_root, config.max_lora_rank, optional, named
        )
        yield _with_aliases(replace(cluster, engine=config), served, limit)


def _with_aliases(
    cluster: ClusterConfig, served: ServedRegistry, limit: int | None
) -> tuple[ClusterConfig, ServedRegistry]:
    """Both with the registry's aliases, and their adapters."""
    found = served.registry.aliases(served.base_hash)
    if not found:
        return cluster, served
    from .saved_aliases import SavedAliases

    def path_of(name: str, version: int) -> str:
        one = served.registry.resolve(name, served.base_hash, version)
        if limit is not None and one.lora_rank > limit:
            raise AdapterError(f"adapter {name!r}: {rank_problem(one.lora_rank, limit)}")
        return one.path

    config, bases = cluster.engine, (cluster.served_model_name, *cluster.other_model_names)
    saved = SavedAliases(dict(config.adapters), bases, path_of)
    saved.load(found)
    config = replace(config, adapters=(*config.adapters, *saved.adapters.items()))
    optional = served.optional | saved.adapters.keys()
    return replace(cluster, engine=config), replace(served, aliases=saved.aliases, optional=optional)


class RegistryVerbs:
    """A registry for front ends.  devices: limit new adapters' ranks."""

    def __init__(self, served: ServedRegistry, devices: Callable[[], set[str]] = set) -> None:
        self.served = served
        self._devices = devices

    @verb
    async def registry_base(self) -> str:
        """The served base model's hash."""
        return self.served.base_hash

    @verb
    async def registry_resolve(self, name: str) -> RegisteredAdapter:
        return await in_daemon_thread(self.served.registry.resolve, name, self.served.base_hash)

    @verb
    async def registry_adapters(self, state: str | None, after: str, limit: int) -> list[RegisteredAdapter]:
        return await asyncio.to_thread(self.served.registry.adapters, state=state, after=after, limit=limit)

    @verb
    async def registry_add(self, name: str, source: str, owner: str, link: bool) -> RegisteredAdapter:
        served = self.served
        add = partial(
            served.registry.add,
            base_hash=served.base_hash,
            owner=owner,
            link=link,
            root=served.root,
            max_lora_rank=rank_limit(served.max_lora_rank, self._devices()),
        )
        return await in_daemon_thread(add, name, source)

    @verb
    async def registry_check(self) -> list[tuple[RegisteredAdapter, str | None]]:
        """Each adapter with its files' problem, if any."""
        return await in_daemon_thread(self.served.registry.check)

    @verb
    async def registry_versions(self, name: str) -> list[RegisteredAdapter]:
        return await asyncio.to_thread(self.served.registry.versions, name)

    @verb
    async def registry_remove(self, name: str, version: int | None) -> list[RegisteredAdapter]:
        return await asyncio.to_thread(self.served.registry.remove, name, version)
