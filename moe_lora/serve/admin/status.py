"""GET /health, /version and /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import moe_lora
from moe_lora.core.errors import EngineDeadError, LoraServerError

from moe_lora.serve.http_errors import ApiError, JsonResponse
from moe_lora.serve.frontend import Frontend


def status_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine works, else 503."""
        if not await frontend.client.is_alive():
            raise ApiError(
                503,
                "no engine is running or gets on; if the server's log names no restart, restart the server",
            )
        return Response()

    @router.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": moe_lora.__version__})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus text; without the engine's part once the engine has ended."""
        collector = frontend.metrics.engine
        try:
            await frontend.info()
            collector.stats = await frontend.client.stats()
        except EngineDeadError:
            collector.stats = None
        provision = frontend.metrics.provision
        if provision is not None and frontend.controller is not None:
            try:
                provision.server = await frontend.controller.server_state()
            except (EngineDeadError, LoraServerError):
                provision.server = None
        return Response(frontend.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
