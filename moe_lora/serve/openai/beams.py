# SPDX-License-Identifier: Apache-2.0
"""Beam search (`use_beam_search`): the n likeliest answers of a search of width n.

Each beam's step is a request for one token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from anyio import fail_after

from moe_lora.core.request import MAX_LOGPROBS, GenerateRequest, SamplingParams, TokenLogprobs, TokenOutput
from moe_lora.engine.text.text import TextStream
from moe_lora.serve.access import Reservation
from moe_lora.serve.http_errors import ApiError, bad_request
from moe_lora.serve.limits import Waiting

from .fields import FieldError
from .generation import Delta, Generation, Outputs, Watchers, late, merge
from .protocol import NO_SEED, ChatRequest, CompletionRequest, SamplingFields

MAX_WIDTH = MAX_LOGPROBS // 2
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("stream", "temperature", "min_tokens", "stop", "echo", "prompt_logprobs", "logit_bias"),
            *("frequency_penalty", "presence_penalty", "allowed_token_ids", "bad_words"),
            *("logprob_token_ids", "processed_logprobs", "return_routed_experts"),
        ),
        _OFF,
    ),
    **dict.fromkeys(("repetition_penalty", "top_p"), (None, 1)),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "seed": (None, NO_SEED),
    "on_publish": (None, "keep"),
}
"""Meaningless fields in a search, with unused values."""


def check_beams(body: SamplingFields) -> None:
    """Raises FieldError for a field that contradicts `use_beam_search`."""
    if not body.use_beam_search:
        what = f"length_penalty={body.length_penalty} needs use_beam_search=true"
        raise FieldError("length_penalty", f"{what}; leave it out, or send null or 1")
    if type(body) not in (CompletionRequest, ChatRequest):
        what = "use_beam_search is not supported for this endpoint; leave it out, or send null or false"
        raise FieldError("use_beam_search", f"{what}. /v1/completions and /v1/chat/completions search")
    if body.num_choices > MAX_WIDTH:
        raise FieldError("n", f"n={body.n} is too wide a beam search; n must be at most {MAX_WIDTH}")
    for name, unused in _NEUTRAL.items():
        if getattr(body, name) not in unused:
            raise FieldError(name, f"{name} is not supported with use_beam_search; leave {name} out")
    if cast("Any", body).logprobs == -1 or getattr(body, "top_logprobs", None) == -1:
        name = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        raise FieldError(name, f"{name}=-1 is not supported with use_beam_search; send at most {MAX_WIDTH}")


class Beam(NamedTuple):
    """An answer so far.  total: sum of log probabilities.  has_ended: by an end token."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    has_ended: bool = False

    def longer(self, top: Sequence[tuple[int, float]], place: int, num_top: int, has_ended: bool) -> Beam:
        token_id, logprob = top[place]
        scores = TokenLogprobs(logprob, place + 1, tuple(top[:num_top]))
        return Beam((*self.token_ids, token_id), (*self.logprobs, scores), self.total + logprob, has_ended)


@dataclass(kw_only=True)
class BeamGeneration(Generation):
    """The `num_choices` best beams of each prompt, best first.

    Score: total / length ** length_penalty, end token included.
    """

    length_penalty: float

    def __post_init__(self) -> None:
        """Raises ApiError for a grammar or a thinking budget."""
        if self.sampling.grammar is not None or self.sampling.thinking is not None:
            what = "use_beam_search is not supported with a grammar or thinking_token_budget"
            raise bad_request(f"{what}; leave use_beam_search out", "use_beam_search")
        self._num_joint = self.num_choices

    async def _choice(
        self, index: int, waits: Waiting, reservation: Reservation | None
    ) -> AsyncGenerator[Delta, None]:
        """All choices of a prompt, from `index` on.  Raises ApiError."""
        request = self._request(index)
        info = await self.frontend.client.model_info()
        ends = {*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else info.eos_token_ids)}
        limit = self.sampling.max_tokens or info.max_model_len - request.prompt_tokens
        with self._attached(request, waits, reservation) as watchers:
            beams, ended, reason = [Beam()], list[Beam](), "length"
            first: TokenOutput | None = None
            while beams and limit:
                outputs = await self._step(request, beams, watchers)
                first = first or outputs[0]
                if any(one.finish_reason == "abort" for one in outputs):
                    reason = "abort"
                    break
                if any(one.adapter_version != first.adapter_version for one in outputs):
                    what = f"the adapter {self.adapter!r} changed during the beam search; send this one again"
                    raise ApiError(503, what)
                beams = self._best_steps(beams, outputs, ends, ended)
                limit -= 1
            assert first is not None
            watchers.reason = reason
            # A search that is aborted in its first step has one beam.
            unbegun = [Beam()] * (self.num_choices - len(ended) - len(beams))
            for place, beam in enumerate([*self._ranked([*ended, *beams]), *unbegun]):
                yield self._whole_delta(index + place, beam, reason, first)

    async def _step(
        self, request: GenerateRequest, beams: Sequence[Beam], watchers: Watchers
    ) -> list[TokenOutput]:
        """Log probabilities of the next token, by beam.  Raises ApiError after the deadline."""
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2 * self.num_choices
        )
        steps = [
            replace(
                request,
                request_id=f"{request.request_id}-{len(beam.token_ids)}-{place}",
                prompt_token_ids=request.prompt_token_ids + beam.token_ids,
                sampling=sampling,
            )
            for place, beam in enumerate(beams)
        ]
        found, timing = dict[str, TokenOutput](), watchers.timing
        streams = [cast("Outputs", self.frontend.client.generate(one)) for one in steps]
        try:
            with fail_after(None if self.timeout_s is None else self._left_s()):
                async with aclosing(merge(streams)) as outputs:
                    async for output in outputs:
                        watchers.record_output(output)
                        if output.finish_reason == "error":
                            self._delta(0, output, None)
                        if output.finish_reason is not None:
                            found[output.request_id] = output
        except TimeoutError:
            raise late(cast("float", self.timeout_s)) from None
        watchers.metrics.tokens(len(steps))
        watchers.timing = timing or watchers.timing  # the first step has queue and prompt
        return [found[one.request_id] for one in steps]

    def _best_steps(
        self, beams: Sequence[Beam], outputs: Sequence[TokenOutput], ends: set[int], ended: list[Beam]
    ) -> list[Beam]:
        """The likeliest beams with one more token; `ended` keeps the best ended beams."""
        tops = [one.logprobs[0].top for one in outputs if one.logprobs]
        steps = [
            (beam, top, place) for beam, top in zip(beams, tops, strict=True) for place in range(len(top))
        ]
        steps.sort(key=lambda step: step[0].total + step[1][step[2]][1], reverse=True)
        going, ending = list[Beam](), list[Beam]()
        for beam, top, place in steps:
            found = ending if top[place][0] in ends else going
            if len(found) < self.num_choices:
                found.append(beam.longer(top, place, self.sampling.logprobs or 0, found is ending))
        ended[:] = self._ranked([*ended, *ending])
        return going

    def _ranked(self, beams: Sequence[Beam]) -> list[Beam]:
        def score(beam: Beam) -> float:
            return beam.total / max(1, len(beam.token_ids)) ** self.length_penalty

        return sorted(beams, key=score, reverse=True)[: self.num_choices]

    def _whole_delta(self, index: int, beam: Beam, reason: str, first: TokenOutput) -> Delta:
        text = None
        if self.tokenizer is not None:
            prompt = self.prompt_of(index) if self.continues_prompt else ()
            text = TextStream(self.tokenizer, stop=(), min_tokens=0, prompt_token_ids=prompt)
        output = TokenOutput(
            request_id=first.request_id,
            token_ids=beam.token_ids,
            logprobs=None if self.sampling.logprobs is None else beam.logprobs,
            finish_reason=cast("Any", "stop" if beam.has_ended else reason),
            num_cached_tokens=first.num_cached_tokens,
            adapter_version=first.adapter_version,
        )
        return self._delta(index, output, text)
