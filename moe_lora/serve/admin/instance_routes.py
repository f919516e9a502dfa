# SPDX-License-Identifier: Apache-2.0
"""Routes for instances: list, drain, restart."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from moe_lora.config.devices import LORA_SERVER, device_name
from moe_lora.core.request import FleetStats, InstanceStats
from moe_lora.serve.bodies import bounded_route
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse

RESTART_S = 300.0
RestartLimit = Annotated[float, Query(gt=0, le=3600)]


def instances_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/instances", tags=["instances"], route_class=bounded_route(frontend.limits))

    async def known() -> dict[str, InstanceStats]:
        stats = await frontend.client.stats()
        if not isinstance(stats, FleetStats):
            raise ApiError(404, "there is but one engine; start with moe-lora serve")
        return {one.name: one for one in stats.instances}

    async def do(method: str, name: str, *args: Any) -> Response:
        found = await known()
        if name not in found and method != "undrain":
            raise ApiError(404, f"there is no instance {name!r}; choose one of {', '.join(found)}")
        await frontend.controller.call(f"{method}_instance", name, *args)
        return JsonResponse(_card((await known()).get(name) or _absent(name)))

    @router.get("", response_model=None)
    async def list_instances() -> Response:
        """Every instance: devices, state and number of requests."""
        listed: dict[str, Any] = {"object": "list", "data": [_card(one) for one in (await known()).values()]}
        numbers = frontend.cluster.devices.get(LORA_SERVER)
        if numbers is not None:
            listed[LORA_SERVER] = {"devices": [device_name(one) for one in numbers]}
        return JsonResponse(listed)

    @router.post("/{name}/drain", response_model=None)
    async def drain(name: str) -> Response:
        """Give the instance no requests; running requests continue at other instances, or end here."""
        return await do("drain", name)

    @router.post("/{name}/undrain", response_model=None)
    async def undrain(name: str) -> Response:
        """Give the instance requests again."""
        return await do("undrain", name)

    @router.post("/{name}/restart", response_model=None)
    async def restart(name: str, limit_s: RestartLimit = RESTART_S) -> Response:
        """Drain the instance, end the process, and answer when the next process takes part: 503 if not in
        `limit_s`.
        """
        return await do("restart", name, limit_s)

    return router


def _absent(name: str) -> InstanceStats:
    return InstanceStats(
        index=0,
        name=name,
        live=False,
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        outstanding_tokens=0,
        num_restarts=0,
        num_resent=0,
    )


def _card(one: InstanceStats) -> dict[str, Any]:
    return {
        "id": one.name,
        "object": "instance",
        "devices": list(one.devices),
        "live": one.live,
        "silent": one.silent,
        "drained": one.drained,
        "requests_running": one.num_running,
        "requests_waiting": one.num_waiting,
        "restarts": one.num_restarts,
    }
