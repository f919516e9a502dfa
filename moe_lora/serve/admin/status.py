# SPDX-License-Identifier: Apache-2.0
"""Routes of status, models, instances and the LoRA Server."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import HTMLResponse, Response

import moe_lora
from moe_lora.config import MAX_COUNT
from moe_lora.config.devices import LORA_SERVER, device_name
from moe_lora.core.errors import EngineDeadError, LoraServerError
from moe_lora.core.host import CLUSTER_MARK, cluster_headers
from moe_lora.core.request import FleetStats, InstanceStats
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.serve.access import caller_of
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.limits import bounded_route
from moe_lora.serve.openai.protocol import ApiModel, Text

if TYPE_CHECKING:
    from moe_lora.core.records import ServerState

NO_ENGINE = "no engine is running or gets on; if the server's log names no restart, restart the server"
RESTART_S = 300.0
RestartLimit = Annotated[float, Query(gt=0, le=3600)]
Layout = Annotated[str, Query(max_length=32)]
InstanceNumber = Annotated[int, Query(ge=1, le=4096)]


class CapacityRequest(ApiModel):
    """POST /v1/lora_server/capacity."""

    capacity: Annotated[int, Field(ge=1, le=MAX_COUNT)]


class MigrateRequest(ApiModel):
    """POST /v1/migrate."""

    source: Text
    target: Text
    num_requests: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    kind: Literal["tokens", "kv"] = "tokens"


def status_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["status"], route_class=bounded_route(frontend.limits))

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine works, else 503."""
        if not await frontend.client.is_alive():
            raise ApiError(503, NO_ENGINE)
        return Response()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 while the engine works and no shutdown has begun, else 503."""
        if frontend.ending.begun:
            raise ApiError(503, "the server is shutting down; send requests elsewhere")
        await health()
        return Response(headers=cluster_headers(os.environ.get(CLUSTER_MARK)))

    @router.head("/live", include_in_schema=False)
    @router.get("/live", response_model=None)
    async def live() -> Response:
        """200 while the server answers; else restart it."""
        return Response()

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": moe_lora.__version__})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus text; without the engine after its end."""
        info = stats = adapters = server = None
        with suppress(EngineDeadError):
            info = await frontend.client.model_info()
            stats = await frontend.client.stats()
            adapters = await frontend.client.list_adapters()
        if frontend.cluster.lora_server is not None:
            with suppress(EngineDeadError, LoraServerError):
                server = await frontend.controller.call("server_state")
        shown = frontend.metrics.show(info, stats, adapters, server)
        return Response(shown, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.post("/v1/migrate", response_model=None)
    async def migrate(body: MigrateRequest) -> Response:
        """Move requests from the instance `source` to `target` during their streams."""
        client = frontend.client
        if not isinstance(client, FleetClient):
            raise ApiError(404, "there is but one engine; start with --instances 2 or more")
        names = [one.name for one in client.instances]
        for field in ("source", "target"):
            if getattr(body, field) not in names:
                raise bad_request(f"{field} is none of the instances {', '.join(names)}", field)
        if body.source == body.target:
            raise bad_request(f"{body.target} is the source; choose another target", "target")
        moved, problems = await client.migrate(body.source, body.target, body.num_requests, body.kind)
        return JsonResponse({"object": "migration", "moved": moved, "problems": problems})

    return router


def models_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    async def cards(request: Request) -> list[dict[str, Any]]:
        """The caller's models; host paths for administrators only."""
        caller, info = caller_of(request.scope), await frontend.client.model_info()
        base = {
            "id": frontend.model_name,
            "object": "model",
            "created": frontend.created_s,
            "owned_by": "moe_lora",
            "root": frontend.model_name,
            "parent": None,
            "max_model_len": info.max_model_len,
        }
        known = {
            adapter.name: {
                **base,
                "id": adapter.name,
                "root": (caller.is_admin and adapter.path) or adapter.name,
                "parent": frontend.model_name,
                "lora_rank": adapter.lora_rank,
                "version": adapter.version,
                "residency": adapter.residency,
            }
            for adapter in await frontend.client.list_adapters()
        }
        if frontend.aliases.live:
            from moe_lora.serve.aliases import with_aliases

            adapters = with_aliases(known, frontend.aliases.live, caller)
        else:
            adapters = [card for name, card in known.items() if caller.may_use(name)]
        return [*[{**base, "id": name} for name in frontend.model_names], *adapters]

    @router.get("/", response_model=None, include_in_schema=False)
    @router.get("", response_model=None)
    async def list_models(request: Request) -> Response:
        """All valid values of a request's `model`."""
        return JsonResponse({"object": "list", "data": await cards(request)})

    @router.get("/{model:path}", response_model=None)
    async def retrieve_model(model: str, request: Request) -> Response:
        """One model or adapter."""
        for card in await cards(request):
            if card["id"] == model:
                return JsonResponse(card)
        raise ApiError(404, f"the model {model!r} does not exist; GET /v1/models lists what does", "model")

    return router


def capacity_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["capacity"], route_class=bounded_route(frontend.limits))

    async def ask_server(method: str, *args: float | str) -> ServerState:
        if frontend.cluster.lora_server is None:
            raise ApiError(404, "there is no LoRA Server; start with --lora-server, or set max_loras")
        state: ServerState = await frontend.controller.call(method, *args)
        return state

    @router.get("/provision", response_model=None)
    async def provision() -> Response:
        """The last evaluation of the load, or null."""
        config, latest = frontend.cluster.provisioning, frontend.controller.figures.outlook
        if config is None:
            raise ApiError(
                404,
                "the load on adapters is not watched; start with a LoRA Server, or with "
                "--set provision.target_iar=0.95",
            )
        report = None if latest is None else {**asdict(latest), "suffices": latest.suffices}
        return JsonResponse({"settings": asdict(config), "latest": report})

    @router.get("/lora_server", response_model=None)
    async def lora_server() -> Response:
        """The LoRA Server's capacity, adapters and waits."""
        return JsonResponse(asdict(await ask_server("server_state")))

    @router.post("/lora_server/capacity", response_model=None)
    async def resize(body: CapacityRequest) -> Response:
        """Hold up to `capacity` adapters from now on."""
        return JsonResponse(asdict(await ask_server("resize", body.capacity)))

    @router.post("/lora_server/layout", response_model=None)
    async def change_layout(layout: Layout, limit_s: RestartLimit = RESTART_S) -> Response:
        """Have `layout`, such as EP4-PP1; without it within `limit_s`, the former server stays."""
        return JsonResponse(asdict(await ask_server("change_layout", layout, limit_s)))

    @router.post("/lora_server/restart", response_model=None)
    async def restart(limit_s: RestartLimit = RESTART_S) -> Response:
        """Restart the LoRA Server's ranks in turn; 503 if a rank needs more than `limit_s`."""
        return JsonResponse(asdict(await ask_server("restart_server", limit_s)))

    return router


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>moe_lora: {model}</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }}
pre {{ background: #eee; padding: 1em; overflow: auto }} td {{ padding-right: 1.5em }}</style>
<h1>{model}</h1>
<p>moe_lora {version} serves this model and its LoRA adapters through the OpenAI interface.
<code>model</code> names the base model or an adapter; <a href="v1/models">/v1/models</a> lists them.</p>
<pre>curl {url}v1/completions -H 'Content-Type: application/json' \\
    -d '{body}'</pre>
<table>{rows}</table>
<p>The same for programs, with all fields: <a href="openapi.json">/openapi.json</a>.</p></html>
"""


def welcome_router(frontend: Frontend, app: FastAPI) -> APIRouter:
    """The page at both addresses, without external resources."""
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_model=None)
    @router.get("/docs", response_model=None)
    async def welcome(request: Request) -> Response:
        prompt = "hello" if frontend.tokenizer is not None else [1, 2, 3]
        body = json.dumps({"model": frontend.model_name, "prompt": prompt, "max_tokens": 16})
        return HTMLResponse(
            PAGE.format(
                model=escape(frontend.model_name),
                version=escape(moe_lora.__version__),
                url=escape(str(request.base_url)),
                body=escape(body.replace("'", "\\u0027"), quote=False),
                rows="".join(_rows(app)),
            )
        )

    return router


def _rows(app: FastAPI) -> list[str]:
    return [
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{escape(one.get('description', ''))}"
        for path, methods in app.openapi()["paths"].items()
        for method, one in methods.items()
    ]


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
        found = await known()
        return JsonResponse(_card(found.get(name) or InstanceStats(index=0, name=name, live=False)))

    @router.get("/", response_model=None, include_in_schema=False)
    @router.get("", response_model=None)
    async def list_instances() -> Response:
        """Every instance: devices, state and number of requests."""
        listed: dict[str, Any] = {"object": "list", "data": [_card(one) for one in (await known()).values()]}
        numbers = frontend.cluster.devices.get(LORA_SERVER)
        if numbers is not None:
            listed[LORA_SERVER] = {"devices": [device_name(one) for one in numbers]}
        return JsonResponse(listed)

    @router.post("/scale", response_model=None)
    async def scale(number: InstanceNumber, limit_s: RestartLimit = RESTART_S) -> Response:
        """Have `number` instances: new ones serve at the return, others leave after a drain."""
        await frontend.controller.call("scale_instances", number, limit_s)
        return await list_instances()

    @router.post("/{name}/drain", response_model=None)
    async def drain(name: str) -> Response:
        """Send the instance no more requests; running requests move, or finish here."""
        return await do("drain", name)

    @router.post("/{name}/undrain", response_model=None)
    async def undrain(name: str) -> Response:
        """Send the instance requests again."""
        return await do("undrain", name)

    @router.post("/{name}/restart", response_model=None)
    async def restart(name: str, limit_s: RestartLimit = RESTART_S) -> Response:
        """Drain the instance and restart its process; 503 after `limit_s`."""
        return await do("restart", name, limit_s)

    return router


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
