"""Requests that an engine can't run, whatever else it does."""

from __future__ import annotations

from moe_lora.core.request import GenerateRequest, ModelInfo


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Raises ValueError for a prompt that is empty or too long, and for token ids that there are not."""
    prompt = request.prompt_token_ids
    limit = info.max_model_len
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) >= limit:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {limit}; "
            "shorten it or raise max_model_len"
        )
    for name, ids in (("prompt", prompt), ("stop_token_ids", request.sampling.stop_token_ids)):
        bad = next((t for t in ids if not 0 <= t < info.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name} has token id {bad}, outside the vocabulary of {info.vocab_size}")
