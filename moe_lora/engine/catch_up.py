"""An engine that was away gets the adapters that the others serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError
from moe_lora.core.request import AdapterInfo

from .loop_client import LoopClient
from .pool_directory import PoolDirectory
from .roster import ServedAdapter

logger = logging.getLogger(__name__)


def catch_up(
    client: LoopClient,
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
            client.call("unload_adapter", name).result()
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
                    info: AdapterInfo = client.call("load_adapter", *words).result()
                    content_hash = info.content_hash or None
                else:
                    pool.give(client, name, adapter.path, adapter.version, content_hash)
                is_loaded = True
            if adapter.pinned != (before is not None and before.pinned):
                client.call("pin_adapter", name, adapter.pinned).result()
            missing.discard(name)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.error("adapter %s is unavailable here: %s", name, error)
            if is_loaded:
                with suppress(AdapterNotFoundError):  # a pool that found no bytes took it away
                    client.call("unload_adapter", name).result()
            missing.add(name)
        have[name] = replace(adapter, content_hash=content_hash)


def held_by(client: LoopClient, pool: PoolDirectory | None = None) -> dict[str, ServedAdapter]:
    """What an engine has once it has done what it was told before.  Raises EngineDeadError.

    pool: learns what the engine knows and holds.
    """
    client.settle()
    if pool is not None:
        pool.enter(client)
    infos: list[AdapterInfo] = client.call("list_adapters").result()
    return {
        info.name: ServedAdapter(info.path or "", info.version, info.pinned, info.content_hash or None)
        for info in infos
    }


def settle_contents(clients: Sequence[LoopClient]) -> dict[str, str]:
    """Have engines that were started alike serve what the first of them has read: name -> content hash.

    Raises AdapterError for what another one can't have.
    """
    found = held_by(clients[0])
    for client in clients[1:]:
        have = held_by(client)
        for name, adapter in found.items():
            if not adapter.is_same(have.get(name)):
                words = (name, adapter.path, True, adapter.version, adapter.content_hash)
                client.call("load_adapter", *words).result()
    return {name: one.content_hash for name, one in found.items() if one.content_hash is not None}
