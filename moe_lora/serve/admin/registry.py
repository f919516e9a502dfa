"""The registry over HTTP: what `moe-lora adapters` does, and where names without a path are found."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from moe_lora.adapters.registry.registered import REMOVED
from moe_lora.config import MAX_COUNT

from .adapter_routes import check_new_name, find_files
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.openai.fields import Text
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.openai.protocol import RegisterAdapterRequest
from moe_lora.dist.cluster.controller.controller_views import RegistryView

MAX_LISTED = 10_000
Version = Annotated[int | None, Query(ge=1, le=MAX_COUNT)]


def registry_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/registry", tags=["registry"])

    def opened() -> RegistryView:
        if frontend.registry is None:
            raise ApiError(404, "there is no registry of adapters; start with --registry FOLDER")
        return frontend.registry

    @router.get("/adapters", response_model=None)
    async def list_registered(
        state: Literal["ready", "broken"] | None = None,
        after: Text = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 1000,
    ) -> Response:
        """Current versions by name, `limit` at once; `after` goes on behind a name."""
        served = opened()
        found = await served.call("adapters", state=state, after=after, limit=limit + 1)
        data = [asdict(one) for one in found[:limit]]
        listed = {"object": "list", "base_hash": await served.base(), "data": data}
        return JsonResponse({**listed, "has_more": len(found) > limit})

    @router.post("/adapters", response_model=None)
    async def register(body: RegisterAdapterRequest) -> Response:
        """Add the PEFT adapter in `lora_path` as the next version of `lora_name`; that does not load it."""
        served = opened()
        check_new_name(body.lora_name, frontend)
        added = await served.call(
            "add",
            body.lora_name,
            find_files(body.lora_path, body.lora_name),
            base_hash=await served.base(),
            owner=body.owner,
            link=body.link,
        )
        return JsonResponse(asdict(added))

    @router.post("/check", response_model=None)
    async def check() -> Response:
        """Read all files of the registry; `problem` is null where they are what was added."""
        served = opened()
        found = await served.call("check")
        data = [{"name": one.name, "version": one.version, "problem": problem} for one, problem in found]
        return JsonResponse({"object": "list", "data": data})

    @router.get("/adapters/{name:path}", response_model=None)
    async def show(name: str) -> Response:
        """All versions of a name, removed ones too."""
        served = opened()
        versions = await served.call("versions", name)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in versions]})

    @router.delete("/adapters/{name:path}", response_model=None)
    async def remove(name: str, version: Version = None) -> Response:
        """Remove one version of a name, or all; what is being served is not."""
        served = opened()
        doomed = [
            one.path
            for one in await served.call("versions", name)
            if one.state != REMOVED and version in (None, one.version)
        ]
        if any(one.name == name and one.path in doomed for one in await frontend.client.list_adapters()):
            raise bad_request(
                f"adapter {name!r} is being served, and an instance that starts again needs its files; "
                "unload it first (/v1/unload_lora_adapter)",
            )
        removed = await served.call("remove", name, version)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in removed]})

    return router
