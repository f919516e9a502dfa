# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of adapters in a request's `lora`: loaded as an adapter at the first use."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from moe_lora.core.composed import Part, name_of, path_of
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError
from moe_lora.core.request import COMPOSED, AdapterInfo

from .http_errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .access import Caller
    from .frontend import Frontend
    from .openai.protocol import WeightedAdapter

MAX_COMPOSED = 32
"""Sums that stay loaded; twice as many while requests start."""
START_S = 2.0
"""Time from the choice of a sum to the start of its request, at most."""
RETRY_S = 5


async def composed(
    frontend: Frontend, model: str, terms: Sequence[WeightedAdapter], caller: Caller
) -> tuple[str, Caller]:
    """The sum's adapter, and the caller with a right to it.  Raises ApiError, and errors of a load."""
    if model not in frontend.model_names:
        raise bad_request(
            f"lora needs the base model, and model is {model!r}; send {frontend.model_name!r}", "model"
        )
    infos = {info.name: info for info in await frontend.client.list_adapters()}
    parts = [_part(term, infos, caller) for term in terms]
    if len({part.name for part in parts}) < len(parts):
        raise bad_request("lora names an adapter twice; add its weights", "lora")
    name = name_of(parts)
    if name not in infos or infos[name].residency == "unavailable":
        await _make_room(frontend, infos)
        with suppress(AdapterExistsError):  # of another request
            await frontend.client.call("load_adapter", name, path_of(parts))
    frontend.composed_s[name] = time.monotonic()
    return name, caller.with_right(name)


def _part(term: WeightedAdapter, infos: dict[str, AdapterInfo], caller: Caller) -> Part:
    info = infos.get(term.name)
    if info is None or not caller.may_use(term.name) or term.name.startswith(COMPOSED):
        what = f"lora names the adapter {term.name!r}, and it does not exist; GET /v1/models lists what does"
        raise ApiError(404, what, "lora")
    if info.path is None or info.residency == "unavailable":
        raise ApiError(503, f"adapter {term.name!r} is unavailable: {info.problem}", "lora")
    return Part(info.name, info.path, info.content_hash, term.weight)


async def _make_room(frontend: Frontend, infos: dict[str, AdapterInfo]) -> None:
    """Unload idle sums beyond `MAX_COMPOSED`, the longest idle first.  Raises ApiError without room."""
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
        with suppress(AdapterNotFoundError):  # another front end was faster
            await frontend.client.call("unload_adapter", info.name)
