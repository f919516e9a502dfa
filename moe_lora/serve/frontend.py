"""What every endpoint needs: the engine, the tokenizer, names, metrics, and the checks of a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import ModelInfo, SamplingParams
from moe_lora.dist.cluster.controller.cluster_state import Controller
from moe_lora.engine.client.client import EngineClient
from moe_lora.serve.metrics.metrics import Metrics

from .http_errors import ApiError, bad_request

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer


# What ends a server's requests when it ends itself.


CUT = "the server is shutting down and does not finish this request; send it again"


class Ending:
    """Ends requests under way, each with an error of its own, when the time to finish them is over."""

    def __init__(self) -> None:
        self.over = False
        self._running: set[asyncio.Task[object]] = set()

    def cut(self) -> None:
        """End what runs with a 503: as the answer, or where one has begun as its last event."""
        self.over = True
        for task in self._running:
            task.cancel()

    @contextmanager
    def ends(self) -> Iterator[None]:
        """While a request's task waits for its engine.  Raises ApiError when it is cut."""
        task = asyncio.current_task()
        assert task is not None
        if self.over:
            raise ApiError(503, CUT)
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            if not self.over:
                raise
            if hasattr(task, "uncancel"):
                task.uncancel()
            raise ApiError(503, CUT) from error
        finally:
            self._running.discard(task)


LONG_TEXT_CHARS = 10_000
"""Texts from here on are tokenized in a thread, so that they don't hold up everyone's tokens."""


@dataclass(kw_only=True)
class Frontend:
    """One engine as one HTTP application sees it.

    tokenizer None: prompts are token ids only.  cluster: what is served, and what a controller does for it.
    controller: runs while it serves.  ending: cuts requests when it ends.  model_name: what requests call the
    base model; every other name is an adapter's.  Whoever makes it closes the client.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    cluster: ClusterConfig
    controller: Controller
    ending: Ending = field(default_factory=Ending)
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.model_name = self.cluster.served_model_name
        self.metrics = Metrics(self.cluster, self.controller)

    def need_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request(
                f"{purpose} needs a tokenizer, but the model's directory has none; "
                "send prompts as token ids to /v1/completions",
            )
        return self.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.  Raises ApiError without a tokenizer."""
        tokenizer = self.need_tokenizer("a text prompt")
        if len(text) < LONG_TEXT_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def for_engine(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, default_max_tokens: int | None
    ) -> SamplingParams:
        """What to ask of the engine.

        Raises ApiError unless the model can take each of these prompts and give as many tokens as asked for.

        default_max_tokens: where none are asked for, if there is room; None: all that there is room for.  The
        tokenizer's end tokens that the engine doesn't know of are added, unless they are to be ignored.
        top_k beyond the vocabulary means all of it, and is not passed on as a number that may be huge.
        """
        info = await self.client.model_info()
        for token_ids in prompts:
            _check_prompt(token_ids, sampling, info)
        check_vocabulary("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
        if sampling.max_tokens is None and default_max_tokens is not None:
            room = info.max_model_len - max(map(len, prompts))
            default = max(default_max_tokens, sampling.min_tokens)
            sampling = replace(sampling, max_tokens=min(default, room))
        if sampling.top_k >= info.vocab_size:
            sampling = replace(sampling, top_k=0)
        if self.tokenizer is None or sampling.ignore_eos:
            return sampling
        known = {*info.eos_token_ids, *sampling.stop_token_ids}
        more = tuple(i for i in self.tokenizer.eos_token_ids if i not in known and i < info.vocab_size)
        return replace(sampling, stop_token_ids=sampling.stop_token_ids + more) if more else sampling


def _check_prompt(token_ids: Sequence[int], sampling: SamplingParams, info: ModelInfo) -> None:
    limit, num_tokens = info.max_model_len, len(token_ids)
    if not token_ids:
        raise bad_request("the prompt has no tokens; give at least one", "prompt")
    if num_tokens >= limit:
        raise bad_request(
            f"the prompt has {num_tokens} tokens, but this model's context is {limit} tokens, "
            "one of which the answer needs; shorten the prompt",
            "prompt",
        )
    for name in ("max_tokens", "min_tokens"):
        asked = getattr(sampling, name) or 0
        if num_tokens + asked > limit:
            raise bad_request(
                f"the prompt's {num_tokens} tokens and {name}={asked} exceed this "
                f"model's context of {limit} tokens; shorten the prompt or lower {name}",
                name,
            )
    check_vocabulary("prompt", token_ids, info.vocab_size)


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise bad_request(f"{name}: token id {wrong} is not in the vocabulary (0 to {vocab_size - 1})", name)
