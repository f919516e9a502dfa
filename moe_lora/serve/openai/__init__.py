# SPDX-License-Identifier: Apache-2.0
"""The front end's OpenAI-compatible endpoints."""

from __future__ import annotations

import asyncio
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

if TYPE_CHECKING:
    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

CHAT_TOKENS = "moe_lora.serve.openai.forwarded_prompt"
CHAT_BATCH = "moe_lora.serve.openai.chat_batch"
RESPONSES = "moe_lora.serve.openai.responses.endpoints"
MESSAGES = "moe_lora.serve.anthropic.endpoints"
TOKENIZING = "moe_lora.serve.openai.tokenizing"
EMBEDDING = "moe_lora.serve.openai.embedding"
COHERE = "moe_lora.serve.openai.cohere"
BATCHES = "moe_lora.serve.batches.endpoints"
INVOCATIONS = "moe_lora.serve.openai.invocations"
TOKEN_IDS = "moe_lora.serve.openai.token_ids"
NATIVE = "moe_lora.serve.openai.native"
SCORING = "moe_lora.serve.openai.scoring"
RENDERING = "moe_lora.serve.openai.rendering"
CONTROLS = "moe_lora.serve.admin.controls"
RECEIVED = "moe_lora.serve.admin.received"
ALIASES = "moe_lora.serve.admin.alias_routes"
LATER = (
    ("POST /v1/chat/completions/tokens", CHAT_TOKENS, "create", "A chat with its prompt as token ids."),
    ("POST /v1/chat/completions/batch", CHAT_BATCH, "create", "Answer several conversations."),
    ("POST /v1/responses", RESPONSES, "create", "Answer with items (OpenAI's Responses)."),
    ("GET /v1/responses/{response_id}", RESPONSES, "read", "A stored response."),
    ("DELETE /v1/responses/{response_id}", RESPONSES, "remove", "Delete a stored response."),
    ("POST /v1/responses/{response_id}/cancel", RESPONSES, "cancel", "End a response in the background."),
    ("POST /v1/messages", MESSAGES, "create", "Answer a conversation (Anthropic's Messages)."),
    ("POST /v1/messages/count_tokens", MESSAGES, "count", "Tokens of the conversation."),
    ("POST /tokenize", TOKENIZING, "tokenize", "Token ids of a prompt, or of rendered messages."),
    ("POST /detokenize", TOKENIZING, "detokenize", "Text of token ids."),
    ("POST /v1/tokenize", TOKENIZING, "tokenize", "As /tokenize (SGLang)."),
    ("POST /v1/detokenize", TOKENIZING, "detokenize_text", "Text of token ids (SGLang)."),
    ("GET /tokenizer_info", TOKENIZING, "info", "The tokenizer's configuration."),
    ("POST /v1/embeddings", EMBEDDING, "embed", "Hidden states of last tokens, of length 1."),
    ("POST /v2/embed", COHERE, "embed", "Hidden states of last tokens by type (Cohere)."),
    ("POST /pooling", EMBEDDING, "pool", "Hidden states of last tokens."),
    ("POST /inference/v1/generate", TOKEN_IDS, "generate", "Answer token ids with token ids."),
    ("POST /inference/v1/abort_requests", TOKEN_IDS, "abort", "End requests by their ids."),
    ("POST /v1/completions/render", RENDERING, "completion", "Bodies of /inference/v1/generate."),
    ("POST /v1/chat/completions/render", RENDERING, "chat", "The body of /inference/v1/generate."),
    ("POST /v1/responses/render", RENDERING, "response", "The body of /inference/v1/generate."),
    ("POST /v1/messages/render", RENDERING, "message", "The body of /inference/v1/generate."),
    ("POST /v1/files", BATCHES, "create_file", "Upload a file of requests."),
    ("GET /v1/files", BATCHES, "list_files", "The key's files."),
    ("GET /v1/files/{file_id}", BATCHES, "read_file", "A file's size and name."),
    ("DELETE /v1/files/{file_id}", BATCHES, "delete_file", "Delete a file."),
    ("GET /v1/files/{file_id}/content", BATCHES, "file_content", "A file's content."),
    ("POST /v1/batches", BATCHES, "create_batch", "Answer a file of requests in the background."),
    ("GET /v1/batches", BATCHES, "list_batches", "The key's batches."),
    ("GET /v1/batches/{batch_id}", BATCHES, "read_batch", "A batch's state."),
    ("POST /v1/batches/{batch_id}/cancel", BATCHES, "cancel_batch", "End a batch; its results stay."),
    ("POST /invocations", INVOCATIONS, "invoke", "Any of the generating endpoints, by the body."),
    ("POST /ping", INVOCATIONS, "ping", "As /health."),
    ("GET /ping", INVOCATIONS, "ping", "As /health."),
    ("HEAD /ping", INVOCATIONS, "ping", "As /health."),
    ("GET /load", INVOCATIONS, "load", "Number of running choices."),
    ("POST /generate", NATIVE, "generate", "Answer a text or token ids (SGLang)."),
    ("POST /v1/score", SCORING, "score", "How likely labels come next (SGLang)."),
    ("POST /abort_requests", TOKEN_IDS, "abort", "As /inference/v1/abort_requests."),
    ("POST /pause", CONTROLS, "pause", "Pause the caller's requests on all instances."),
    ("POST /resume", CONTROLS, "resume", "End the caller's pause; an administrator ends all."),
    ("GET /is_paused", CONTROLS, "is_paused", "Whether the caller's requests are paused."),
    ("POST /sleep", CONTROLS, "sleep", "Give memory back on all instances."),
    ("POST /wake_up", CONTROLS, "wake_up", "End a sleep, or a part of it."),
    ("GET /is_sleeping", CONTROLS, "is_sleeping", "Whether an instance sleeps."),
    ("POST /release_memory_occupation", CONTROLS, "release_memory", "As /sleep, by parts (SGLang)."),
    ("POST /resume_memory_occupation", CONTROLS, "resume_memory", "As /wake_up (SGLang)."),
    ("GET /server_info", CONTROLS, "server_info", "Model and limits, under vLLM's names."),
    ("GET /model_info", CONTROLS, "model_info", "The model, under SGLang's names."),
    ("GET /get_model_info", CONTROLS, "model_info", "As /model_info."),
    ("GET /get_server_info", CONTROLS, "sglang_info", "Model and limits, under SGLang's names."),
    ("GET /get_world_size", CONTROLS, "world_size", "Number of processes with the model."),
    ("POST /reset_prefix_cache", CONTROLS, "reset_prefix_cache", "Forget all computed prompts."),
    ("GET /liveness", CONTROLS, "liveness", "As /live."),
    ("HEAD /liveness", CONTROLS, "liveness", "As /live."),
    ("GET /health_generate", CONTROLS, "health_generate", "200 after a token; at once if paused or asleep."),
    ("POST /pause_generation", CONTROLS, "pause_generation", "As /pause (SGLang)."),
    ("POST /continue_generation", CONTROLS, "continue_generation", "As /resume (SGLang)."),
    ("GET /flush_cache", CONTROLS, "flush_cache", "As /reset_prefix_cache (SGLang)."),
    ("POST /flush_cache", CONTROLS, "flush_cache", "As /reset_prefix_cache (SGLang)."),
    ("POST /abort_request", NATIVE, "abort", "End requests by rid, or all (SGLang)."),
    ("PUT /v1/adapters/{name:path}", RECEIVED, "put", "Serve the tensors of the body."),
    ("POST /load_lora_adapter_from_tensors", RECEIVED, "load", "Serve tensors in base64 (SGLang)."),
    ("POST /v1/aliases/{name:path}/rollout", ALIASES, "rollout", "Send a share of requests to an adapter."),
    ("POST /v1/aliases/{name:path}/promote", ALIASES, "promote", "Send every request to the new adapter."),
    ("POST /v1/aliases/{name:path}/rollback", ALIASES, "rollback", "Undo the last rollout."),
    ("POST /v1/aliases/{name:path}/drop", ALIASES, "drop", "Keep the former adapter no longer."),
    ("DELETE /v1/aliases/{name:path}", ALIASES, "remove", "Remove an alias."),
    *(
        (f"POST /update_weights_from_{source}", CONTROLS, "refuse_weights", "Refused: publish an adapter.")
        for source in ("disk", "tensor", "distributed", "ipc")
    ),
    ("GET /get_weight_version", CONTROLS, "weight_version", "Versions of adapters."),
)
"""Endpoint, module, method, description.  The first request imports the module."""
_FORMS = ("/v1/files",)
_FLAG = {"type": "boolean"}
_QUERIES: dict[str, dict[str, Any]] = {
    "/pause": {
        "mode": {"enum": ["abort", "wait", "keep"], "default": "abort"},
        "clear_cache": _FLAG,
        "wait_for_inflight_requests": {**_FLAG, "default": False},
    },
    "/sleep": {
        "level": {"enum": [1, 2], "default": 1},
        "mode": {"enum": ["abort", "wait", "keep"], "default": "abort"},
    },
    "/wake_up": {
        "tags": {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}},
    },
    "/is_sleeping": {},
    "/server_info": {"config_format": {"enum": ["json"]}},
    "/model_info": {},
    "/get_model_info": {},
    "/get_server_info": {},
    "/get_world_size": {"include_dp": {**_FLAG, "default": True}},
    "/resume": {},
    "/reset_prefix_cache": {},
    "/flush_cache": {},
}
"""Values in the URL, by path."""
_NAMED = re.compile(r"{(\w+)(?::path)?}")


def _form_of(method: str, path: str) -> dict[str, Any]:
    """An endpoint's parameters and body in OpenAPI."""
    if names := _NAMED.findall(path):
        text = {"required": True, "schema": {"type": "string"}}
        found: dict[str, Any] = {"parameters": [{"name": name, "in": "path", **text} for name in names]}
        if method == "PUT":
            content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
            found["requestBody"] = {"content": content, "required": True}
            found["parameters"].append({"name": "X-Adapter-Config", "in": "header", **text})
        return found
    if path in _QUERIES:
        place = {"in": "query", "required": False}
        values = [{"name": name, **place, "schema": form} for name, form in _QUERIES[path].items()]
        return {"parameters": values} if values else {}
    if method != "POST":
        return {}
    kind = "multipart/form-data" if path in _FORMS else "application/json"
    return {"requestBody": {"content": {kind: {"schema": {"type": "object"}}}, "required": True}}


def later_router(frontend: Frontend, preparer: Preparer) -> APIRouter:
    router, loaded = APIRouter(tags=["generate"]), dict[str, Any]()

    def add(endpoint: str, module: str, name: str, description: str) -> None:
        method, path = endpoint.split(" ")

        async def handle(request: Request) -> Response:
            if module not in loaded:
                found = await asyncio.to_thread(import_module, module)
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
            include_in_schema=method != "HEAD",
            openapi_extra=_form_of(method, path),
        )

    for one in LATER:
        add(*one)
    return router
