# SPDX-License-Identifier: Apache-2.0
"""Aliases of adapters: steps of a rollout, and requests' adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from moe_lora.core.errors import AdapterError, AdapterNotFoundError, ConfigError
from moe_lora.engine.client.messages import Alias

MAX_ALIASES = 1000
MAX_REMOVED = 256
"""Most remembered removed aliases."""


def learn(known: dict[str, Alias], found: Mapping[str, Alias]) -> None:
    """Add later steps; keep the latest `MAX_REMOVED` removed aliases."""
    unknown = Alias()
    known |= {name: one for name, one in found.items() if one.number > known.get(name, unknown).number}
    gone = sorted((one.number, name) for name, one in known.items() if not one.current)
    for _, name in gone[:-MAX_REMOVED]:
        del known[name]


def replace_all(known: dict[str, Alias], found: Mapping[str, Alias]) -> None:
    """Replace the shared dictionary's content."""
    known.clear()
    known |= found


def drawn_adapter(name: str, alias: Alias, key: str) -> str:
    """The adapter of a key: `second` for `alias.share` of the keys.

    A key's adapter is constant; a larger share keeps the keys of `second`.
    """
    if not alias.share:
        return alias.current
    text = f"{name}\0{alias.second}\0{key}".encode("utf-8", "surrogatepass")
    place = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return alias.second if place < alias.share * 2**64 else alias.current


def targets(alias: Alias) -> tuple[str, ...]:
    return tuple(filter(None, (alias.current, alias.second)))


def of_adapter(aliases: Mapping[str, Alias], adapter: str) -> Iterator[str]:
    return (name for name, alias in aliases.items() if adapter in targets(alias))


def check_load(aliases: Mapping[str, Alias], name: str) -> None:
    """Raises AdapterError for an alias without this adapter: no request would reach the load."""
    alias = aliases[name]
    if alias.current and name not in targets(alias):
        raise AdapterError(
            f"{name!r} is an alias of adapter {alias.current!r}; load under another name and roll that name "
            "out, or remove the alias"
        )


def check_unload(aliases: Mapping[str, Alias], name: str) -> None:
    """Raises AdapterError for an adapter of an alias."""
    for alias in of_adapter(aliases, name):
        raise AdapterError(
            f"alias {alias!r} keeps adapter {name!r} loaded; promote or roll back, then drop, or remove the "
            "alias"
        )


def rolled_out(name: str, alias: Alias, target: str, share: float | None, served: Collection[str]) -> Alias:
    """The alias with `target` for this share of the requests.  Raises ConfigError.

    A first rollout without an adapter named `name` serves `target` alone.
    """
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"share={share:g} must be above 0 and at most 1; 0.05 is 5 % of the requests")
    current = alias.current or (name if name in served else "")
    if not current:
        if share not in (None, 1):
            raise ConfigError(
                f"{name!r} has no adapter yet for the requests outside share={share:g}; roll out a first "
                "adapter without a share"
            )
        return Alias(target)
    if target == current:
        raise ConfigError(f"{name!r} serves {target!r} already; choose a different adapter")
    if share is None:
        raise ConfigError(
            f"requests for {name!r} reach {current!r}; state the share of {target!r}, above 0 and at most 1"
        )
    if alias.stage == "rollout" and target != alias.second:
        raise ConfigError(f"{name!r} rolls out {alias.second!r}; promote it or roll back first")
    return replace(alias, current=current, second=target, share=share, stage="rollout")


def promoted(name: str, alias: Alias) -> Alias:
    """`second` gets the requests.  Raises ConfigError without a rollout."""
    if alias.stage != "rollout":
        raise ConfigError(f"{name!r} has no rollout to promote; roll an adapter out first")
    return replace(alias, current=alias.second, second=alias.current, share=0.0, stage="promoted")


def rolled_back(name: str, alias: Alias) -> Alias:
    """The alias before the last rollout, even after its promotion.

    Idempotent.  Raises ConfigError without a former adapter.
    """
    if alias.stage == "settled":
        raise ConfigError(
            f"{name!r} has no rollout to roll back: it serves {alias.current!r} alone; roll another adapter "
            "out, or remove the alias"
        )
    if alias.stage == "promoted":
        return replace(alias, current=alias.second, second=alias.current, share=0.0, stage="rolled_back")
    return replace(alias, share=0.0, stage="rolled_back") if alias.stage == "rollout" else alias


def dropped(name: str, alias: Alias) -> Alias:
    """The alias without `second`.  Raises ConfigError during a rollout."""
    if alias.stage == "rollout":
        raise ConfigError(f"{name!r} rolls out {alias.second!r}; promote it or roll back first")
    return replace(alias, second="", stage="settled") if alias.second else alias


def removed(name: str, alias: Alias) -> Alias:
    return Alias()


STEPS = {"promote": promoted, "rollback": rolled_back, "drop": dropped, "remove": removed}


def check_exists(name: str, alias: Alias) -> None:
    """Raises AdapterNotFoundError for a removed or unknown alias."""
    if not alias.current:
        raise AdapterNotFoundError(
            f"{name!r} is no alias; a rollout makes an alias, GET /v1/adapters lists them"
        )
