"""One request of a replay: the body that is sent, and the record of what came back."""

from __future__ import annotations

from typing import Any

from moe_lora.config.plan import ReplayOptions
from moe_lora.workload.replay_plan import PlannedRequest
from moe_lora.workload.prompts import random_token_ids

from .load_client import ServerError, StreamedCompletion
from .latency import RequestTiming
from .records import RequestRecord


def request_body(planned: PlannedRequest, options: ReplayOptions) -> dict[str, Any]:
    """The JSON body of one completion request."""
    prompt: str | list[int] | None = planned.prompt
    if prompt is None:
        prompt = random_token_ids(
            planned.index, planned.prompt_tokens, options.vocab_size, options.seed, planned.hash_ids
        )
    body: dict[str, Any] = {
        "model": planned.adapter or options.model,
        "prompt": prompt,
        "max_tokens": planned.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if planned.answer is None and options.force_length == "ignore-eos":
        body["ignore_eos"] = True
    elif planned.answer is None and options.force_length == "min-tokens":
        body["min_tokens"] = planned.output_tokens
    return body


def finished_record(planned: PlannedRequest, completion: StreamedCompletion, start_s: float) -> RequestRecord:
    """The record of a completion: the server's token counts, and its own timing where usage.timing has it."""
    usage, text = completion.usage, "".join(completion.texts)
    timing = RequestTiming(
        sent_s=completion.sent_s - start_s,
        token_times_s=tuple(moment - start_s for moment in completion.token_times_s),
        end_s=completion.end_s - start_s,
        num_output_tokens=_count(usage, "completion_tokens") or len(completion.token_times_s),
        decode_ttft_ms=_server_ms(usage, "decode_ttft_ms"),
    )
    return RequestRecord(
        adapter=planned.adapter,
        arrival_s=planned.arrival_s,
        sent_s=timing.sent_s,
        input_tokens=_count(usage, "prompt_tokens") or planned.prompt_tokens,
        timing=timing,
        text=text,
        exact=None if planned.answer is None else text.strip() == planned.answer.strip(),
        queue_ms=_server_ms(usage, "queue_ms"),
        adapter_load_ms=_server_ms(usage, "adapter_load_ms"),
        kv_load_ms=_server_ms(usage, "kv_load_ms"),
    )


def _count(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key) or 0
    if not isinstance(value, int) or value < 0:
        raise ServerError(f"usage.{key} is {value!r}, not a whole number >= 0")
    return value


def _server_ms(usage: dict[str, Any], key: str) -> float | None:
    """A field of this project's extension `usage.timing`; None where the server has none."""
    timing = usage.get("timing")
    value = timing.get(key) if isinstance(timing, dict) else None
    if value is not None and not isinstance(value, (int, float)):
        raise ServerError(f"usage.timing.{key} is {value!r}, not a number of ms")
    return value
