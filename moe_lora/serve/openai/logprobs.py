"""Log probabilities in the forms of the two generating endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_lora.core.request import TokenLogprobs

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token alone as text; "token_id:7" where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id], skip_special_tokens=False)


class CompletionLogprobs:
    """Collects `choices[].logprobs` of /v1/completions; text_offset counts from the answer's start."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The entry for tokens that follow those taken before."""
        entry: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            text = token_text(self._tokenizer, token_id)
            likeliest = {
                token_text(self._tokenizer, other): _finite(logprob) for other, logprob in chosen.top
            }
            entry["tokens"].append(text)
            entry["token_logprobs"].append(_finite(chosen.logprob))
            entry["top_logprobs"].append({**likeliest, text: _finite(chosen.logprob)})
            entry["text_offset"].append(self._offset)
            self._offset += len(text)
        return entry


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, list[dict[str, Any]]]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = [
        {
            **entry(token_id, chosen.logprob),
            "top_logprobs": [entry(other, logprob) for other, logprob in chosen.top],
        }
        for token_id, chosen in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
