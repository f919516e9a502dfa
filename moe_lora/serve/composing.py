# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of adapters in `lora`, loaded at first use."""

from __future__ import annotations

import time
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from moe_lora.core.composed import Part, name_of, path_of
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError
from moe_lora.core.request import COMPOSED, AdapterInfo, GenerateRequest, TokenOutput
from moe_lora.dist.cluster.instances import ServedVersion

from .http_errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .access import Caller
    from .frontend import Frontend
    from .openai.protocol import WeightedAdapter

MAX_COMPOSED = 32
"""Loaded sums; twice as many while requests start."""
START_S = 2.0
"""Longest time from a sum's choice to its request's start."""
RETRY_S = 5
_TRIES = 3
"""Another front end may unload a sum before the start."""


@dataclass(frozen=True)
class LoadedSum:
    """A sum on the instances.  path: see `core.composed.path_of`."""

    name: str
    path: str
    frontend: Frontend

    async def load(self) -> None:
        with suppress(AdapterExistsError):
            await self.frontend.client.call("load_adapter", self.name, self.path)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        """The request's outputs; reloads an unloaded sum."""
        for num_left in reversed(range(_TRIES)):
            self.frontend.composed_s[self.name] = time.monotonic()
            has_begun = False
            try:
                async with aclosing(cast("Any", self.frontend.client.generate(request))) as outputs:
                    async for output in outputs:
                        has_begun = True
                        yield output
                return
            except AdapterNotFoundError:
                if has_begun or not num_left:
                    raise
            await self.load()


async def composed(
    frontend: Frontend, model: str, terms: Sequence[WeightedAdapter], caller: Caller
) -> tuple[str, Caller, LoadedSum]:
    """Name and caller of the sum, and the sum.  Raises ApiError, and errors of a load."""
    if model not in frontend.model_names:
        raise bad_request(
            f"lora needs the base model, and model is {model!r}; send {frontend.model_name!r}", "model"
        )
    for name in {term.name for term in terms}:
        if caller.may_use(name):
            await frontend.client.is_served(name)
    infos = {info.name: info for info in await frontend.client.list_adapters()}
    parts = [_part(term, infos, caller) for term in terms]
    if len({part.name for part in parts}) < len(parts):
        raise bad_request("lora names an adapter twice; add its weights", "lora")
    found = LoadedSum(name_of(parts), path_of(parts), frontend)
    if found.name not in infos or infos[found.name].residency == "unavailable":
        await _make_room(frontend, infos)
        await found.load()
    frontend.composed_s[found.name] = time.monotonic()
    return found.name, caller.with_right(found.name), found


def _part(term: WeightedAdapter, infos: dict[str, AdapterInfo], caller: Caller) -> Part:
    info = infos.get(term.name)
    if info is None or not caller.may_use(term.name) or term.name.startswith(COMPOSED):
        what = f"lora names the adapter {term.name!r}, and it does not exist; GET /v1/models lists what does"
        raise ApiError(404, what, "lora")
    if info.path is None or info.residency == "unavailable":
        raise ApiError(503, f"adapter {term.name!r} is unavailable: {info.problem}", "lora")
    return Part(info.name, info.path, info.content_hash, term.weight)


async def _make_room(frontend: Frontend, infos: dict[str, AdapterInfo]) -> None:
    """Unload idle sums beyond `MAX_COMPOSED`.  Raises ApiError without room."""
    sums = [info for info in infos.values() if info.name.startswith(COMPOSED)]
    used_s, now_s = frontend.composed_s, time.monotonic()
    for name in [name for name, last_s in used_s.items() if now_s >= last_s + START_S]:
        del used_s[name]
    idle = [info for info in sums if not info.num_running + info.num_waiting and info.name not in used_s]
    idle.sort(key=lambda info: (info.idle_s is None, -(info.idle_s or 0.0)))
    idle = idle[: max(0, len(sums) + 1 - MAX_COMPOSED)]
    if len(sums) - len(idle) >= 2 * MAX_COMPOSED:
        what = f"{len(sums)} weighted sums of adapters are in use; send the request again later"
        raise ApiError(503, what, retry_s=RETRY_S)
    for info in idle:
        seen = ServedVersion(info.path or "", info.version, info.pinned, info.content_hash or None)
        with suppress(AdapterNotFoundError):  # another front end was faster
            await frontend.client.call("unload_adapter", info.name, seen)
