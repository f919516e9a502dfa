"""An engine that was away gets the adapters that the others serve."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError
from moe_lora.core.request import AdapterInfo

from moe_lora.engine.client.client import CallableEngine
from moe_lora.dist.cluster.pool.directory import PoolDirectory
from .instances import ServedAdapter

if TYPE_CHECKING:
    from .listener import DialledClient

logger = logging.getLogger(__name__)


async def catch_up(
    client: CallableEngine,
    served: dict[str, ServedAdapter],
    have: dict[str, ServedAdapter],
    missing: set[str],
    pool: PoolDirectory | None = None,
) -> None:
    """Load, unload and pin until the engine has what is `served`; what fails is noted as missing.

    pool: where adapters are held; None: the engine reads them all.
    """
    for name in [name for name in have if name not in served]:
        if name not in missing:
            await client.ask("unload_adapter", name)
        missing.discard(name)
        if pool is not None:
            pool.forget(name, have[name].version)
        del have[name]
    for name, adapter in served.items():
        before = have.get(name)
        is_there = adapter.is_same(before)
        if is_there and before is not None and before.pinned == adapter.pinned:
            continue
        is_loaded, content_hash = name in have and name not in missing, adapter.content_hash
        try:
            if not is_there:
                if pool is None:
                    words = (name, adapter.path, True, adapter.version, content_hash)
                    info: AdapterInfo = await client.ask("load_adapter", *words)
                    content_hash = info.content_hash or None
                else:
                    await pool.give(client, name, adapter.path, adapter.version, content_hash)
                is_loaded = True
            if adapter.pinned != (before is not None and before.pinned):
                await client.ask("pin_adapter", name, adapter.pinned)
            missing.discard(name)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.error("adapter %s is unavailable here: %s", name, error)
            if is_loaded:
                with suppress(AdapterNotFoundError):  # a pool that found no bytes took it away
                    await client.ask("unload_adapter", name)
            missing.add(name)
        have[name] = replace(adapter, content_hash=content_hash)


async def held_by(client: DialledClient, pool: PoolDirectory | None = None) -> dict[str, ServedAdapter]:
    """What an engine has once it has done what it was told before.  Raises EngineDeadError.

    pool: learns what the engine knows and holds.
    """
    await client.settled()
    if pool is not None:
        await pool.enter(client)
    infos: list[AdapterInfo] = await client.ask("list_adapters")
    return {
        info.name: ServedAdapter(info.path or "", info.version, info.pinned, info.content_hash or None)
        for info in infos
    }
