"""How the places for adapters meet the load, and the LoRA Server's capacity while serving."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import Response

from moe_lora.serve.http_errors import ApiError, JsonResponse
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.openai.protocol import CapacityRequest
from moe_lora.dist.cluster.controller.controller_views import ProvisionView


def capacity_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["capacity"])

    def controller() -> ProvisionView:
        if frontend.controller is None:
            raise ApiError(
                404, "the load on adapters is not watched; start with --target-iar or a LoRA Server"
            )
        return frontend.controller

    def with_server() -> ProvisionView:
        if frontend.controller is None or not frontend.controller.has_server:
            raise ApiError(404, "there is no LoRA Server; start with --lora-server, or set max_loras")
        return frontend.controller

    @router.get("/provision", response_model=None)
    async def provision() -> Response:
        """What the last evaluation of the load found; `latest` is null before the first one."""
        config, latest = controller().config, controller().latest
        report = None if latest is None else {**asdict(latest), "suffices": latest.suffices}
        return JsonResponse({"settings": asdict(config), "latest": report})

    @router.get("/lora_server", response_model=None)
    async def lora_server() -> Response:
        """The LoRA Server's capacity, what is resident, who waits."""
        state = await with_server().server_state()
        assert state is not None
        return JsonResponse(asdict(state))

    @router.post("/lora_server/capacity", response_model=None)
    async def resize(body: CapacityRequest) -> Response:
        """Hold up to `capacity` adapters at once from now on; running requests are served to the end."""
        return JsonResponse(asdict(await with_server().resize(body.capacity)))

    return router
