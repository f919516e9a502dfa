# SPDX-License-Identifier: Apache-2.0
"""A chat's prompt as token ids (vLLM's kv_transfer_params.prompt_token_ids, prime-rl's
POST /v1/chat/completions/tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from moe_lora.serve.http_errors import bad_request

from .fields import FieldError
from .preparing import out_of_vocabulary
from .protocol import ChatRequest

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.responses import Response
    from typing_extensions import Self

    from moe_lora.serve.frontend import Frontend

    from .preparing import Preparer

PLACE, FIELD = "kv_transfer_params", "prompt_token_ids"


class TokensChat(ChatRequest):
    """A chat with its prompt as token ids."""

    tokens: Any

    @model_validator(mode="after")
    def _set_prompt(self) -> Self:
        if self.kv_transfer_params:
            raise FieldError(PLACE, f"tokens is the prompt, and {PLACE} states another; leave {PLACE} out")
        self.kv_transfer_params = {FIELD: self.tokens}
        return self


class Endpoints:
    """Endpoint of one front end."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend, self._preparer = frontend, preparer

    async def create(self, request: Request) -> Response:
        from .endpoints import answer_chat, prepared_answer  # not in the checking process

        async def respond(body: TokensChat, request: Request) -> Response:
            return await answer_chat(self._frontend, body, request)

        return await prepared_answer(self._frontend, self._preparer.prepare, TokensChat, respond, request)


def forwarded_prompt(body: ChatRequest, vocab_size: int) -> list[int]:
    """The token ids.  Raises ApiError for wrong ids, and fields for messages."""
    assert body.kv_transfer_params is not None
    place, name = ("tokens", "tokens") if isinstance(body, TokensChat) else (PLACE, f"{PLACE}.{FIELD}")
    unknown = next((name for name in body.kv_transfer_params if name != FIELD), None)
    if unknown is not None:
        what = f"{PLACE}.{unknown[:64]} is not supported: no KV cache moves between servers"
        raise bad_request(f"{what}; leave it out, or send {FIELD} alone", PLACE)
    if body.echo or body.continue_final_message or len(body.conversations) > 1:
        what = "echo, continue_final_message and lists of conversations read the messages"
        raise bad_request(f"{name} replaces the messages, but {what}; send one of them", place)
    ids = body.kv_transfer_params[FIELD]
    if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
        raise bad_request(f"{name} must be a list of token ids with at least one", place)
    wrong = next((one for one in ids if not 0 <= one < vocab_size), None)
    if wrong is not None:
        raise out_of_vocabulary(place, wrong, vocab_size)
    return ids
