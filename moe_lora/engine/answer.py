"""One request's outputs on their way to a completion."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.core.request import FinishReason, GenerateRequest, TokenLogprobs, TokenOutput

from moe_lora.engine.text.text import TextDelta, TextStream


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer.  text is None where the model directory has no tokenizer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    adapter: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0


class Answer:
    """Collects one request's outputs; stop strings end it."""

    def __init__(self, request: GenerateRequest, stream: TextStream | None) -> None:
        self.request = request
        self._stream = stream
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._cached = 0
        self.finish_reason: FinishReason | None = None

    def take(self, output: TokenOutput) -> str:
        """Add an output; the text that became certain.  Sets finish_reason once the answer is complete."""
        self._cached = output.num_cached_tokens
        delta = TextDelta("", len(output.token_ids))
        if self._stream is not None:
            ended = output.finish_reason == "stop"
            delta = self._stream.push(output.token_ids[:-1] if ended else output.token_ids)
            if ended and not delta.stopped:
                delta = TextDelta(delta.text, len(output.token_ids))
        self._tokens += output.token_ids[: delta.num_tokens]
        self._logprobs += (output.logprobs or ())[: delta.num_tokens]
        text = delta.text
        self.finish_reason = "stop" if delta.stopped else output.finish_reason
        if self.finish_reason is not None and not delta.stopped and self._stream is not None:
            rest = self._stream.flush()
            text += rest.text
            if rest.stopped:
                self.finish_reason = "stop"
        self._text.append(text)
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self._tokens),
            text=None if self._stream is None else "".join(self._text),
            finish_reason=self.finish_reason,
            adapter=self.request.adapter,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
            num_cached_tokens=self._cached,
        )
