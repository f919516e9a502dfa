# SPDX-License-Identifier: Apache-2.0
"""Routes for adapters: load, unload, list, pin, and the registry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import PlainTextResponse, Response

from moe_lora.config import MAX_COUNT
from moe_lora.core.records import REMOVED
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request
from moe_lora.serve.limits import bounded_route
from moe_lora.serve.openai.fields import ignored_header, shown_name
from moe_lora.serve.openai.protocol import (
    LoadAdapterRequest,
    RegisterAdapterRequest,
    Text,
    UnloadAdapterRequest,
    refuse_unknown,
)

from .adapter_loads import AdapterLoads, check_new_name, find_files

DONE = {"status": "ok", "success": True}
"""Answer of the routes at the root, in the words of prime-rl and SGLang."""


def adapters_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["adapters"], route_class=bounded_route(frontend.limits))
    loads = AdapterLoads(frontend)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Serve the PEFT adapter in `lora_path` as `lora_name`; with `load_inplace`, as a new version.

        Without `lora_path`: the registry's adapter of that name.
        """
        headers = ignored_by(body, frontend)
        await loads.load(body, in_place=body.load_inplace)
        what = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(what, headers=headers)

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Refuse new requests for `lora_name`, let running ones end, free its memory."""
        headers = ignored_by(body, frontend)
        await loads.unload(body)
        what = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(what, headers=headers)

    @router.post("/load_lora_adapter", response_model=None)
    async def load_or_replace(body: LoadAdapterRequest) -> Response:
        """Serve the PEFT adapter in `lora_path` as `lora_name`; a loaded name gets a new version.

        Equal content changes nothing.
        """
        headers = ignored_by(body, frontend)
        await loads.load_or_replace(body)
        return JsonResponse(DONE, headers=headers)

    @router.post("/unload_lora_adapter", response_model=None)
    async def unload_at_root(body: UnloadAdapterRequest) -> Response:
        """As /v1/unload_lora_adapter, with an answer in JSON."""
        headers = ignored_by(body, frontend)
        await loads.unload(body)
        return JsonResponse(DONE, headers=headers)

    @router.get("/v1/adapters", response_model=None)
    async def list_adapters() -> Response:
        """Every adapter: place, size, users."""
        cards = [_card(info) for info in await frontend.client.list_adapters()]
        return JsonResponse({"object": "list", "data": cards})

    @router.post("/v1/adapters/{name:path}/pin", response_model=None)
    async def pin(name: str) -> Response:
        """Load the adapter to the device of every instance and keep it there; 400 if no room would be
        left.
        """
        return JsonResponse(_card(await frontend.client.call("pin_adapter", name, pinned=True)))

    @router.post("/v1/adapters/{name:path}/unpin", response_model=None)
    async def unpin(name: str) -> Response:
        """Let the adapter leave the device again."""
        return JsonResponse(_card(await frontend.client.call("pin_adapter", name, pinned=False)))

    return router


def _card(info: AdapterInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "adapter",
        "version": info.version,
        "lora_rank": info.lora_rank,
        "bytes": info.nbytes,
        "path": info.path,
        "residency": info.residency,
        "problem": info.problem or None,
        "pages": info.num_pages,
        "pinned": info.pinned,
        "idle_s": None if info.idle_s is None else round(info.idle_s, 3),
        "requests_running": info.num_running,
        "requests_waiting": info.num_waiting,
    }


def ignored_by(body: LoadAdapterRequest | UnloadAdapterRequest, frontend: Frontend) -> dict[str, str]:
    """Returns the header with the unknown fields of a body.  Raises ApiError if the server refuses them."""
    if frontend.limits.config.unknown_fields == "error":
        refuse_unknown(body)
    names = [shown_name(name) for name in body.unknown_fields()]
    frontend.ignored_fields.note(names)
    return ignored_header(names)


MAX_LISTED = 10_000
Version = Annotated[int | None, Query(ge=1, le=MAX_COUNT)]


def registry_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/registry", tags=["registry"], route_class=bounded_route(frontend.limits))

    def check_opened() -> None:
        if frontend.cluster.registry is None:
            raise ApiError(404, "there is no registry of adapters; start with --registry FOLDER")

    async def ask(method: str, *args: Any) -> Any:
        check_opened()
        return await frontend.controller.call(f"registry_{method}", *args)

    @router.get("/adapters", response_model=None)
    async def list_registered(
        state: Literal["ready", "broken"] | None = None,
        after: Text = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 1000,
    ) -> Response:
        """Current versions by name, `limit` at once; `after` goes on behind a name."""
        found = await ask("adapters", state, after, limit + 1)
        data = [asdict(one) for one in found[:limit]]
        listed = {"object": "list", "base_hash": await ask("base"), "data": data}
        return JsonResponse({**listed, "has_more": len(found) > limit})

    @router.post("/adapters", response_model=None)
    async def register(body: RegisterAdapterRequest) -> Response:
        """Add the PEFT adapter in `lora_path` as the next version of `lora_name`, without a load."""
        check_opened()
        check_new_name(body.lora_name, frontend)
        place = await in_daemon_thread(find_files, body.lora_path, body.lora_name, frontend)
        return JsonResponse(asdict(await ask("add", body.lora_name, place, body.owner, body.link)))

    @router.post("/check", response_model=None)
    async def check() -> Response:
        """Read all files of the registry; `problem` is null for unchanged files."""
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
        """Remove a version of a name, or all versions; running instances keep serving the adapter."""
        versions = [one for one in await ask("versions", name) if version in (None, one.version)]
        doomed = [one.path for one in versions if one.state != REMOVED]
        if any(one.name == name and one.path in doomed for one in await frontend.client.list_adapters()):
            raise bad_request(
                f"adapter {name!r} is being served, and an instance that starts again needs its files; "
                "unload it first (/v1/unload_lora_adapter)",
            )
        removed = await ask("remove", name, version)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in removed]})

    return router
