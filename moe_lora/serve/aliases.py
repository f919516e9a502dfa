# SPDX-License-Identifier: Apache-2.0
"""Aliases at a front end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import Scope

from moe_lora.dist.cluster.aliases import drawn_adapter, targets
from moe_lora.serve.access import caller_of
from moe_lora.serve.frontend import adapter_in

from .metric_families import family

if TYPE_CHECKING:
    from moe_lora.engine.client.messages import Alias

    from .access import Caller
    from .api_keys import ApiKey


@dataclass(frozen=True)
class AliasChoice:
    """Aliases at a request's arrival.  granted: adapters by a right to an alias."""

    aliases: Mapping[str, Alias]
    bases: Sequence[str]
    key: ApiKey | None
    request_id: str
    granted: set[str] = field(default_factory=set)

    def adapter(self, model: str, body: Any) -> str:
        """The adapter of an alias, sticky by the body's user, else by request; else the model.

        A key with a right to one adapter gets that adapter; without a right, the model.
        """
        name = adapter_in(model, self.bases, self.aliases)
        alias = self.aliases.get(name)
        if alias is None:
            return model
        found = drawn_adapter(name, alias, user_of(body) or self.request_id)
        allowed = usable(name, alias, self.key)
        for one in (found, alias.current, alias.second if alias.share else ""):
            if one in allowed:
                if self.key is not None and not self.key.may_use(one):
                    self.granted.add(one)
                return one
        return model


def usable(name: str, alias: Alias, key: ApiKey | None) -> tuple[str, ...]:
    """The key's adapters of the alias; a right to the alias gives all."""
    found = targets(alias)
    return found if key is None or key.may_use(name) else tuple(filter(key.may_use, found))


def choice_of(aliases: Mapping[str, Alias], bases: Sequence[str], scope: Scope) -> AliasChoice:
    return AliasChoice(aliases, bases, caller_of(scope).key, scope["state"]["request_id"])


def user_of(body: Any) -> str:
    """The body's user, or ""."""
    if not isinstance(body, dict):
        return ""
    body = body["body"] if body.keys() == {"previous", "body"} else body
    metadata = body.get("metadata")
    of_messages = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = (body.get("user"), body.get("safety_identifier"), of_messages)
    return next((one for one in found if one and isinstance(one, str)), "")


def shares(alias: Alias) -> Iterator[tuple[str, float]]:
    """Adapters of the alias, with their shares."""
    yield alias.current, 1.0 - alias.share
    if alias.second:
        yield alias.second, alias.share


def alias_card(name: str, alias: Alias, key: ApiKey | None = None) -> dict[str, Any]:
    """The alias as a key sees it; a single permitted adapter has share 1."""
    allowed = usable(name, alias, key)
    if len(allowed) < len(targets(alias)):
        rows = [{"adapter": adapter, "share": 1.0} for adapter in allowed]
    else:
        rows = [{"adapter": adapter, "share": round(share, 6)} for adapter, share in shares(alias)]
    return {"id": name, "object": "alias", "stage": alias.stage, "targets": rows}


def alias_cards(aliases: Mapping[str, Alias]) -> list[dict[str, Any]]:
    return [alias_card(name, alias) for name, alias in sorted(aliases.items())]


def with_aliases(
    cards: Mapping[str, dict[str, Any]], aliases: Mapping[str, Alias], caller: Caller
) -> list[dict[str, Any]]:
    """The caller's adapters of these cards, and aliases.

    An alias hides an adapter of the same name.
    """
    shown = [card for name, card in cards.items() if name not in aliases and caller.may_use(name)]
    for name, alias in aliases.items():
        allowed = [one for one in usable(name, alias, caller.key) if one in cards]
        if allowed and (alias.current in allowed or alias.share):
            shown.append({**cards[allowed[0]], "id": name, "alias": alias_card(name, alias, caller.key)})
    return shown


def share_family(model_name: str, aliases: Mapping[str, Alias], limit: int) -> Metric:
    shown = islice(aliases.items(), limit)
    return family(
        GaugeMetricFamily,
        "moe_lora:alias_share",
        "Share of an alias's new requests, by adapter.",
        ("model_name", "alias", "adapter"),
        {(model_name, name, adapter): share for name, one in shown for adapter, share in shares(one)},
    )
