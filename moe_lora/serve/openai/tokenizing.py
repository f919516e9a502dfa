# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in vLLM's form."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from moe_lora.engine.text.tokenizer_files import CONFIG, read_json
from moe_lora.serve.http_errors import ApiError, JsonResponse

from .preparing import Preparer, out_of_vocabulary
from .prompt_bodies import DetokenizeRequest, ReadBody, TokenizeRequest, check_total, read_body

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.frontend import Frontend


class Endpoints:
    """Methods answer one path each."""

    def __init__(self, frontend: Frontend, preparer: Preparer) -> None:
        self._frontend = frontend
        self._preparer = preparer

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise ApiError(404, "this server has no tokenizer; send token ids to /v1/completions")
        return self._frontend.tokenizer

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt, or of messages in the chat template."""
        tokenizer = self._tokenizer
        found = await read_body(request, TokenizeRequest, self._frontend, self._preparer)
        [token_ids] = found.prompts
        strings = None
        if found.body.return_token_strs:
            strings = await asyncio.to_thread(_strings, tokenizer, token_ids)
        info, headers = await self._frontend.client.model_info(), self._note(found)
        return JsonResponse(
            {
                "count": len(token_ids),
                "max_model_len": info.max_model_len,
                "tokens": list(token_ids),
                "token_strs": strings,
            },
            headers=headers,
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        tokenizer = self._tokenizer
        found = await read_body(request, DetokenizeRequest, self._frontend, self._preparer)
        info, tokens = await self._frontend.client.model_info(), found.body.tokens
        check_total(len(tokens), self._frontend.limits, "tokens")
        wrong = max(tokens, default=0)
        if wrong >= info.vocab_size:
            raise out_of_vocabulary("tokens", wrong, info.vocab_size)
        text = await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=False)
        return JsonResponse({"prompt": text}, headers=self._note(found))

    def _note(self, found: ReadBody) -> dict[str, str]:
        return self._frontend.ignored_fields.note(found.ignored)

    async def info(self, request: Request) -> Response:
        """The content of tokenizer_config.json, with the served chat templates."""
        tokenizer = self._tokenizer
        found: dict[str, Any] = {} if tokenizer.folder is None else dict(read_json(tokenizer.folder / CONFIG))
        found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        sources = {} if tokenizer.chat_templates is None else tokenizer.chat_templates.sources
        if sources:
            only = list(sources) == ["default"]
            found["chat_template"] = sources["default"] if only else sources
        return JsonResponse(found)


def _strings(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.backend.id_to_token(one) or "" for one in token_ids]
