# SPDX-License-Identifier: Apache-2.0
"""Engines as a target of `report.replay` without HTTP, whose cost per token exceeds this machine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.client.client import EngineClient
from moe_lora.report.load_client import ServerError, StreamedCompletion


class EngineCompletions:
    """`report.replay.Completions` over an engine client.  base_model: the name without an adapter."""

    def __init__(self, client: EngineClient, base_model: str) -> None:
        self._client = client
        self._base_model = base_model

    async def complete(self, body: dict[str, Any]) -> StreamedCompletion:
        adapter = None if body["model"] == self._base_model else body["model"]
        sampling = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=body["ignore_eos"]
        )
        request = GenerateRequest(
            request_id=uuid4().hex, prompt_token_ids=tuple(body["prompt"]), sampling=sampling, adapter=adapter
        )
        completion = StreamedCompletion(sent_s=time.perf_counter())
        async for output in self._client.generate(request):
            now_s = time.perf_counter()
            completion.token_times_s += [now_s] * len(output.token_ids)
            if output.finish_reason in ("abort", "error"):
                raise ServerError(f"the engine ended the request: {output.error or output.finish_reason}")
            if output.timing is not None:
                completion.end_s, completion.finish_reason = now_s, output.finish_reason
                completion.usage = _usage(body, completion, output.timing)
        return completion


def _usage(body: dict[str, Any], completion: StreamedCompletion, timing: Any) -> dict[str, Any]:
    """As the HTTP front end reports it."""
    return {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": len(completion.token_times_s),
        "timing": {
            "decode_ttft_ms": timing.decode_ttft_s * 1e3,
            "queue_ms": timing.queue_s * 1e3,
            "adapter_load_ms": timing.adapter_load_s * 1e3,
        },
    }


@asynccontextmanager
async def completions(client: EngineClient, base_model: str) -> AsyncIterator[EngineCompletions]:
    """Nothing to open or close: the engines live longer than a run."""
    yield EngineCompletions(client, base_model)
