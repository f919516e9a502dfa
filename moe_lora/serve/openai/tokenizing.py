# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize, and GET /tokenizer_info."""

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
        """Token ids of a prompt, of several, or of messages."""
        tokenizer = self._tokenizer
        found = await read_body(request, TokenizeRequest, self._frontend, self._preparer)
        strings = None
        if found.body.return_token_strs:
            strings = await asyncio.to_thread(_strings, tokenizer, found.prompts)
        info, headers = await self._frontend.client.model_info(), self._note(found)
        lists = {"count": list(map(len, found.prompts)), "tokens": found.prompts, "token_strs": strings}
        one = {name: values and values[0] for name, values in lists.items()}
        shown = lists if found.body.is_batch else one
        return JsonResponse({**shown, "max_model_len": info.max_model_len}, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, with special tokens, as `prompt`; SGLang's form has `text`."""
        found = await read_body(request, DetokenizeRequest, self._frontend, self._preparer)
        return await self._detokenized(found, is_plain=found.body.skip_special_tokens is None)

    async def detokenize_text(self, request: Request) -> Response:
        """As `detokenize`, in SGLang's form, without special tokens."""
        found = await read_body(request, DetokenizeRequest, self._frontend, self._preparer)
        return await self._detokenized(found, is_plain=False)

    async def _detokenized(self, found: ReadBody, *, is_plain: bool) -> Response:
        tokenizer, tokens, skip = self._tokenizer, found.body.tokens, found.body.skip_special_tokens
        is_batch = bool(tokens) and isinstance(tokens[0], list)
        lists = tokens if is_batch else [tokens]
        check_total(sum(map(len, lists)), self._frontend.limits, "tokens")
        info = await self._frontend.client.model_info()
        wrong = max((max(one, default=0) for one in lists), default=0)
        if wrong >= info.vocab_size:
            raise out_of_vocabulary("tokens", wrong, info.vocab_size)
        is_plain = is_plain and not is_batch
        skip = not is_plain if skip is None else skip
        texts = await asyncio.to_thread(tokenizer.backend.decode_batch, lists, skip_special_tokens=skip)
        shown = {"prompt": texts[0]} if is_plain else {"text": texts if is_batch else texts[0]}
        return JsonResponse(shown, headers=self._note(found))

    def _note(self, found: ReadBody) -> dict[str, str]:
        return self._frontend.ignored_fields.note(found.ignored)

    async def info(self, request: Request) -> Response:
        """tokenizer_config.json with the served chat templates."""
        tokenizer = self._tokenizer
        found: dict[str, Any] = {} if tokenizer.folder is None else dict(read_json(tokenizer.folder / CONFIG))
        found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        sources = {} if tokenizer.chat_templates is None else tokenizer.chat_templates.sources
        if sources:
            only = list(sources) == ["default"]
            found["chat_template"] = sources["default"] if only else sources
        return JsonResponse(found)


def _strings(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[tokenizer.backend.id_to_token(one) or "" for one in token_ids] for token_ids in prompts]
