"""GET /v1/models: the base model and its adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from moe_lora.serve.http_errors import ApiError, JsonResponse
from moe_lora.serve.frontend import Frontend


def models_router(frontend: Frontend) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"])

    async def cards() -> list[dict[str, Any]]:
        info = await frontend.info()
        base = {
            "id": frontend.model_name,
            "object": "model",
            "created": frontend.created_s,
            "owned_by": "moe_lora",
            "root": info.model_dir,
            "parent": None,
            "max_model_len": info.max_model_len,
        }
        adapters = [
            {
                **base,
                "id": adapter.name,
                "root": adapter.path or adapter.name,
                "parent": frontend.model_name,
                "lora_rank": adapter.lora_rank,
                "version": adapter.version,
                "residency": adapter.residency,
            }
            for adapter in await frontend.client.list_adapters()
        ]
        return [base, *adapters]

    @router.get("", response_model=None)
    async def list_models() -> Response:
        """Everything that a request's `model` may name."""
        return JsonResponse({"object": "list", "data": await cards()})

    @router.get("/{model:path}", response_model=None)
    async def retrieve_model(model: str) -> Response:
        """One model or adapter."""
        for card in await cards():
            if card["id"] == model:
                return JsonResponse(card)
        raise ApiError(404, f"the model {model!r} does not exist; GET /v1/models lists what does", "model")

    return router
