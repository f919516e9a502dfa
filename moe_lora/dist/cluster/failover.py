"""A request that goes on at another instance when the one that computes it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import structs

from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.engine.client.client import EngineClient

MAX_RESENDS = 3
"""A request under which this many instances and one more have ended may be what ends them."""


@dataclass(eq=False)
class ResumableRequest:
    """What of a request's answer has been handed on.

    adapter_version: of the request's adapter: the one that began the answer, and until then the one that was
    served when it came.  client: the engine that computes it now.  Times are in seconds of the caller's
    clock.
    """

    request: GenerateRequest
    adapter_version: int | None
    arrival_s: float
    delivered: list[int] = field(default_factory=list)
    num_resends: int = 0
    aborted: bool = False
    client: EngineClient | None = None
    _num_cached: int = 0
    _waited_s: float = 0.0

    def continued(self, adapter_content: str | None = None) -> GenerateRequest:
        """The request as another instance goes on with it: the same, and what its answer has so far.

        adapter_content: hash of the version that began it; None: it is not known.
        """
        if not self.delivered:
            return self.request
        return replace(
            self.request,
            adapter_version=self.adapter_version,
            adapter_content=adapter_content,
            generated=tuple(self.delivered),
        )

    def lose(self, now_s: float) -> None:
        """The instance ended.  While nothing has been delivered, the time with it counts as queueing."""
        self.num_resends += 1
        if not self.delivered:
            self._waited_s = now_s - self.arrival_s

    def take(self, output: TokenOutput) -> TokenOutput:
        """An instance's output as the client is to see it: as if one instance had made all of them.

        Cached tokens are those of the first instance that delivered any.  Timing is the last instance's: of
        an answer that was cut, what the first one would have reported is lost with it.
        """
        if not self.num_resends:
            self._num_cached = output.num_cached_tokens
        else:
            if not self.delivered:
                self._num_cached = output.num_cached_tokens
            timing = output.timing
            if timing is not None:
                timing = replace(timing, queue_s=timing.queue_s + self._waited_s)
            output = structs.replace(output, num_cached_tokens=self._num_cached, timing=timing)
        self.delivered += output.token_ids
        if output.adapter_version is not None:
            self.adapter_version = output.adapter_version
        return output


def token_work(request: GenerateRequest, max_model_len: int) -> int:
    """Tokens that the request may need, in rows to compute: its prompt and the longest answer allowed."""
    num_prompt = len(request.prompt_token_ids)
    room = max(0, max_model_len - num_prompt)
    limit = request.sampling.max_tokens
    return num_prompt + (room if limit is None else min(limit, room))
