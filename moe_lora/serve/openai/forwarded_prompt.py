# SPDX-License-Identifier: Apache-2.0
"""A chat's prompt as token ids of an earlier stage (vLLM's kv_transfer_params.prompt_token_ids)."""

from __future__ import annotations

from moe_lora.serve.http_errors import bad_request

from .preparing import out_of_vocabulary
from .protocol import ChatRequest

PLACE, FIELD = "kv_transfer_params", "prompt_token_ids"


def forwarded_prompt(body: ChatRequest, vocab_size: int) -> list[int]:
    """The token ids.  Raises ApiError for other ids and fields, and beside fields for messages."""
    assert body.kv_transfer_params is not None
    unknown = next((name for name in body.kv_transfer_params if name != FIELD), None)
    if unknown is not None:
        what = f"{PLACE}.{unknown[:64]} is not supported: no KV cache moves between servers"
        raise bad_request(f"{what}; leave it out, or send {FIELD} alone", PLACE)
    if body.echo or body.continue_final_message or len(body.conversations) > 1:
        what = "echo, continue_final_message and lists of conversations read the messages"
        raise bad_request(f"{PLACE}.{FIELD} replaces the messages, but {what}; send one of them", PLACE)
    ids = body.kv_transfer_params[FIELD]
    if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
        raise bad_request(f"{PLACE}.{FIELD} must be a list of token ids with at least one", PLACE)
    wrong = next((one for one in ids if not 0 <= one < vocab_size), None)
    if wrong is not None:
        raise out_of_vocabulary(PLACE, wrong, vocab_size)
    return ids
