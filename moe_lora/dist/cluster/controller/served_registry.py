"""A registry beside a running server, and what of it is served from the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import Registry
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import AdapterError, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRegistry:
    """A registry and the hash of the base model that is served; root: as `EngineConfig.adapter_root`."""

    registry: Registry
    base_hash: str
    root: str | None = None


@contextmanager
def opened_registry(
    cluster: ClusterConfig,
) -> Iterator[tuple[ClusterConfig, ServedRegistry | None]]:
    """Settings that name what is served of the registry from the start, and that, closed with the context.

    An adapter with lost or altered files is left out and logged, unless it was named.  Raises AdapterError or
    AdapterNotFoundError for one that was, RegistryError or ConfigError if the registry or the base model
    can't be read, or names collide.
    """
    settings, config = cluster.registry, cluster.engine
    if settings is None:
        yield cluster, None
        return
    with Registry(settings.folder) as registry:
        base_hash = base_model_hash(config.model_dir)
        taken = {
            cluster.served_model_name,
            *cluster.other_model_names,
            *(name for name, _ in config.adapters),
        }
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
        config = replace(config, adapters=(*config.adapters, *found))
        yield replace(cluster, engine=config), ServedRegistry(registry, base_hash, config.adapter_root)
