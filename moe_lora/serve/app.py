"""The HTTP application over one engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import moe_lora

from moe_lora.serve.admin.adapter_routes import adapters_router
from moe_lora.serve.admin.capacity import capacity_router
from moe_lora.serve.openai.chat import chat_router
from moe_lora.serve.openai.completions import completions_router
from .http_errors import install_error_handlers
from .frontend import Frontend
from moe_lora.serve.admin.models import models_router
from moe_lora.serve.admin.registry import registry_router
from moe_lora.serve.openai.request_ids import HEADER, RequestIds
from moe_lora.serve.admin.status import status_router
from moe_lora.serve.admin.welcome import welcome_router


def create_app(frontend: Frontend) -> FastAPI:
    """OpenAI-compatible endpoints over a front end's engine; it does not run the front end's tasks."""
    # FastAPI's pages at /docs and /redoc load scripts from elsewhere, which a server without a network can't.
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        title="moe_lora",
        version=moe_lora.__version__,
        description="Many LoRA adapters over one model, through the OpenAI interface.",
    )
    install_error_handlers(app)
    app.add_middleware(RequestIds)
    if frontend.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=frontend.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    generating, managing = (
        (completions_router, chat_router),
        (models_router, adapters_router, registry_router, capacity_router),
    )
    for make_router in (*generating, *managing, status_router):
        app.include_router(make_router(frontend))
    app.include_router(welcome_router(frontend, app))
    return app
