"""The HTTP application over one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

import moe_lora
from moe_lora.engine.client import EngineClient

from .adapters import adapters_router
from .capacity import capacity_router
from .chat import chat_router
from .completions import completions_router
from .controller import Controller
from .errors import install_error_handlers
from .frontend import Frontend
from .metrics import Metrics
from .models import models_router
from .placement import PlacementController
from .registry import registry_router
from .served_registry import ServedRegistry
from .status import status_router

if TYPE_CHECKING:
    from moe_lora.engine.text import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    model_name: str,
    controller: Controller | None = None,
    placement: PlacementController | None = None,
    registry: ServedRegistry | None = None,
) -> FastAPI:
    """OpenAI-compatible endpoints over `client`.

    tokenizer None: prompts are token ids only.  model_name: what requests call the base model; every other
    name is an adapter's.  The app does not close the client, and does not run the controllers.
    """
    frontend = Frontend(
        client=client,
        tokenizer=tokenizer,
        model_name=model_name,
        metrics=Metrics(model_name, controller, placement),
        controller=controller,
        registry=registry,
    )
    # FastAPI's pages at /docs and /redoc load scripts from elsewhere, which a server without a network can't.
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        title="moe_lora",
        version=moe_lora.__version__,
        description="Many LoRA adapters over one model, through the OpenAI interface.",
    )
    install_error_handlers(app)
    generating, managing = (
        (completions_router, chat_router),
        (models_router, adapters_router, registry_router, capacity_router),
    )
    for make_router in (*generating, *managing, status_router):
        app.include_router(make_router(frontend))
    return app
