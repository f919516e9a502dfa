# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible endpoints of the HTTP front end."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

LATER = (
    ("POST /v1/responses", "openai.responses.endpoints.create", "Answer with items (OpenAI's Responses)."),
    ("GET /v1/responses/{response_id}", "openai.responses.endpoints.read", "A stored response."),
    ("DELETE /v1/responses/{response_id}", "openai.responses.endpoints.remove", "Delete a stored response."),
    (
        "POST /v1/responses/{response_id}/cancel",
        "openai.responses.endpoints.cancel",
        "Refused: it has ended.",
    ),
    ("POST /v1/messages", "anthropic.endpoints.create", "Answer a conversation (Anthropic's Messages)."),
    ("POST /v1/messages/count_tokens", "anthropic.endpoints.count", "Tokens of the conversation."),
    ("POST /tokenize", "openai.tokenizing.tokenize", "Token ids of a prompt, or of rendered messages."),
    ("POST /detokenize", "openai.tokenizing.detokenize", "Text of token ids."),
    ("GET /tokenizer_info", "openai.tokenizing.info", "The tokenizer's configuration."),
    ("POST /v1/embeddings", "openai.embedding.embed", "Hidden states of last tokens, of length 1."),
    ("POST /pooling", "openai.embedding.pool", "Hidden states of last tokens."),
    ("POST /invocations", "openai.invocations.invoke", "Any of the generating endpoints, by the body."),
    ("POST /ping", "openai.invocations.ping", "As /health."),
    ("GET /ping", "openai.invocations.ping", "As /health."),
    ("GET /load", "openai.invocations.load", "Number of running choices."),
)
"""Endpoint, method of a module's `Endpoints`, description.  The first request imports the module."""
_BODY = {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}}
_ID = {"parameters": [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]}


def later_router(frontend: Frontend, preparer: Preparer) -> APIRouter:
    """The endpoints of `LATER`."""
    router, loaded = APIRouter(tags=["generate"]), dict[str, Any]()

    def add(endpoint: str, place: str, description: str) -> None:
        method, path = endpoint.split(" ")
        module, name = place.rsplit(".", 1)

        async def handle(request: Request) -> Response:
            if module not in loaded:
                found = await asyncio.to_thread(import_module, f"moe_lora.serve.{module}")
                loaded.setdefault(module, found.Endpoints(frontend, preparer))
            response: Response = await getattr(loaded[module], name)(request)
            return response

        router.add_api_route(
            path,
            handle,
            methods=[method],
            name=name,
            description=description,
            response_model=None,
            openapi_extra=_ID if "{" in path else _BODY,
        )

    for one in LATER:
        add(*one)
    return router
