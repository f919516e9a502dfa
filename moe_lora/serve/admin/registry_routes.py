# SPDX-License-Identifier: Apache-2.0
"""Routes of the registry of adapters."""

from __future__ import annotations

from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from moe_lora.config import MAX_COUNT
from moe_lora.core.request import name_matches
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import JsonResponse, bad_request
from moe_lora.serve.limits import bounded_route
from moe_lora.serve.openai.protocol import ApiModel, Text

from .adapter_routes import check_new_name, find_files

MAX_LISTED = 10_000
Version = Annotated[int | None, Query(ge=1, le=MAX_COUNT)]


class RegisterAdapterRequest(ApiModel):
    """POST /v1/registry/adapters."""

    lora_name: Text
    lora_path: Text
    owner: Text = ""
    link: bool = False


def registry_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/registry", tags=["registry"], route_class=bounded_route(frontend.limits))

    async def ask(method: str, *args: Any) -> Any:
        return await frontend.controller.call(f"registry_{method}", *args)

    @router.get("/adapters", response_model=None)
    async def list_registered(
        state: Literal["ready", "broken"] | None = None,
        after: Text = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 1000,
    ) -> Response:
        """Current versions by name, up to `limit`, behind the name `after`."""
        found = await ask("adapters", state, after, limit + 1)
        data = [asdict(one) for one in found[:limit]]
        listed = {"object": "list", "base_hash": await ask("base"), "data": data}
        return JsonResponse({**listed, "has_more": len(found) > limit})

    @router.post("/adapters", response_model=None)
    async def register(body: RegisterAdapterRequest) -> Response:
        """Add the PEFT adapter in `lora_path` as the next version of `lora_name`."""
        check_new_name(body.lora_name, frontend)
        place = await in_daemon_thread(find_files, body.lora_path, body.lora_name, frontend)
        return JsonResponse(asdict(await ask("add", body.lora_name, place, body.owner, body.link)))

    @router.post("/check", response_model=None)
    async def check() -> Response:
        """Read all files of the registry; `problem`: null for unchanged files."""
        found = await ask("check")
        data = [{"name": one.name, "version": one.version, "problem": problem} for one, problem in found]
        return JsonResponse({"object": "list", "data": data})

    @router.get("/adapters/{name:path}", response_model=None)
    async def show(name: str) -> Response:
        """All versions of a name, including removed versions."""
        versions = await ask("versions", name)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in versions]})

    @router.delete("/adapters/{name:path}", response_model=None)
    async def remove(name: str, version: Version = None) -> Response:
        """Remove a version, or all; running instances keep the adapter."""
        from moe_lora.core.records import REMOVED

        versions = [one for one in await ask("versions", name) if version in (None, one.version)]
        doomed = [Path(one.path) for one in versions if one.state != REMOVED]
        served = frontend.client.adapters.items()
        if any(Path(one.path) in doomed for key, one in served if name_matches(key, [escape(name)])):
            raise bad_request(
                f"adapter {name!r} is being served, and an instance that starts again needs its files; "
                "unload it first (/v1/unload_lora_adapter)",
            )
        removed = await ask("remove", name, version)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in removed]})

    return router
