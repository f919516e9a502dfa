"""Adapters while serving: loaded and unloaded as by vLLM's endpoints, listed, pinned."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import PlainTextResponse, Response

from moe_lora.adapters.peft.files import CONFIG_FILE, adapter_folder, confined
from moe_lora.adapters.registry.registry import REMOVED, RegisteredAdapter
from moe_lora.config import MAX_COUNT
from moe_lora.core.errors import AdapterError, AdapterExistsError
from moe_lora.core.request import AdapterInfo, name_problem
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.serve.bodies import bounded_route
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, JsonResponse, bad_request, to_api_error
from moe_lora.serve.openai.protocol import (
    LoadAdapterRequest,
    RegisterAdapterRequest,
    Text,
    UnloadAdapterRequest,
)
from moe_lora.serve.served_text import log_text_of


def check_name(name: str) -> None:
    """Raises ApiError for names that can't be served."""
    if problem := name_problem(name):
        raise bad_request(f"lora_name {problem}", "lora_name")


def check_new_name(name: str, frontend: Frontend) -> None:
    """Raises ApiError for names that no adapter can have."""
    check_name(name)
    if name == frontend.model_name:
        raise bad_request(f"lora_name {name!r} is the base model's name; choose another", "lora_name")


def find_files(path: str, name: str, frontend: Frontend) -> str:
    """The directory of the adapter at `path` (see `adapter_folder`).

    Raises ApiError 400 for an empty path or one of several adapters, 404 where no adapter lies, or outside of
    `adapter_root`, of which nothing else is told.  Not for the event loop: the folder may be large, or hang.
    """
    if not path:
        raise bad_request("lora_path is empty; give the directory of a PEFT adapter", "lora_path")
    root = frontend.cluster.engine.adapter_root
    if not confined(path, root):
        raise ApiError(
            404, f"no LoRA adapter found: {path!r} is not in the server's adapter_root", "lora_path"
        )
    try:
        found = adapter_folder(path, name)
    except AdapterError as error:
        raise bad_request(str(error), "lora_path") from error
    if not os.path.isfile(os.path.join(found, CONFIG_FILE)):
        problem = f"has no {CONFIG_FILE}" if os.path.isdir(path) else "is not a directory on the server"
        raise ApiError(404, f"no LoRA adapter found: {path!r} {problem}", "lora_path")
    return found


def adapters_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["adapters"], route_class=bounded_route(frontend.limits))

    @router.post("/load_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Serve the PEFT adapter in `lora_path` as `lora_name`; with `load_inplace`, as its new version.

        Without `lora_path` it is the adapter that the registry has under that name.
        """
        check_new_name(body.lora_name, frontend)
        path = await _find(body, frontend)
        try:
            await frontend.client.load_adapter(body.lora_name, path, replace=body.load_inplace)
        except FileNotFoundError as error:
            what = f"no LoRA adapter found: the files of {body.lora_name!r} are gone"
            raise ApiError(404, what, "lora_path") from error
        except AdapterExistsError as error:
            how = "unload it first, or send load_inplace=true to replace it"
            raise bad_request(f"adapter {body.lora_name!r} is already loaded; {how}", "lora_name") from error
        except OSError as error:
            raise bad_request(f"adapter {body.lora_name!r} can't be read: {error.strerror}") from error
        except Exception as error:
            raise to_api_error(error) from error
        await in_daemon_thread(log_text_of, frontend.cluster, body.lora_name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse, response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Refuse new requests for `lora_name`, let running ones end, free its memory."""
        check_name(body.lora_name)
        await frontend.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @router.get("/adapters", response_model=None)
    async def list_adapters() -> Response:
        """Every adapter: where it lies, what it takes, who uses it."""
        cards = [_card(info) for info in await frontend.client.list_adapters()]
        return JsonResponse({"object": "list", "data": cards})

    @router.post("/adapters/{name:path}/pin", response_model=None)
    async def pin(name: str) -> Response:
        """Bring the adapter to the device of every instance and keep it there; 400 if that left no room."""
        return JsonResponse(_card(await frontend.client.pin_adapter(name, pinned=True)))

    @router.post("/adapters/{name:path}/unpin", response_model=None)
    async def unpin(name: str) -> Response:
        """Let the adapter leave the device again."""
        return JsonResponse(_card(await frontend.client.pin_adapter(name, pinned=False)))

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
        "pages": info.num_pages,
        "pinned": info.pinned,
        "idle_s": None if info.idle_s is None else round(info.idle_s, 3),
        "requests_running": info.num_running,
        "requests_waiting": info.num_waiting,
    }


async def _find(body: LoadAdapterRequest, frontend: Frontend) -> str:
    """Where the adapter's files lie.  Raises ApiError, and what `Registry.resolve` raises."""
    if body.lora_path is not None:
        return await in_daemon_thread(find_files, body.lora_path, body.lora_name, frontend)
    if frontend.cluster.registry is None:
        raise bad_request(
            "lora_path is missing; give the directory of a PEFT adapter, or start the server with --registry",
            "lora_path",
        )
    found: RegisteredAdapter = await frontend.controller.call("registry_resolve", body.lora_name)
    return found.path


# The registry over HTTP: what `moe-lora adapters` does, and where names without a path are found.


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
        """Add the PEFT adapter in `lora_path` as the next version of `lora_name`; that does not load it."""
        check_opened()
        check_new_name(body.lora_name, frontend)
        place = await in_daemon_thread(find_files, body.lora_path, body.lora_name, frontend)
        return JsonResponse(asdict(await ask("add", body.lora_name, place, body.owner, body.link)))

    @router.post("/check", response_model=None)
    async def check() -> Response:
        """Read all files of the registry; `problem` is null where they are what was added."""
        found = await ask("check")
        data = [{"name": one.name, "version": one.version, "problem": problem} for one, problem in found]
        return JsonResponse({"object": "list", "data": data})

    @router.get("/adapters/{name:path}", response_model=None)
    async def show(name: str) -> Response:
        """All versions of a name, removed ones too."""
        versions = await ask("versions", name)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in versions]})

    @router.delete("/adapters/{name:path}", response_model=None)
    async def remove(name: str, version: Version = None) -> Response:
        """Remove one version of a name, or all; what is being served is not."""
        doomed = [
            one.path
            for one in await ask("versions", name)
            if one.state != REMOVED and version in (None, one.version)
        ]
        if any(one.name == name and one.path in doomed for one in await frontend.client.list_adapters()):
            raise bad_request(
                f"adapter {name!r} is being served, and an instance that starts again needs its files; "
                "unload it first (/v1/unload_lora_adapter)",
            )
        removed = await ask("remove", name, version)
        return JsonResponse({"object": "list", "data": [asdict(one) for one in removed]})

    return router
