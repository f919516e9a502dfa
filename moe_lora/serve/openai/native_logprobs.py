# SPDX-License-Identifier: Apache-2.0
"""Further log probabilities of /generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from moe_lora.core.request import TokenLogprobs

from .endpoints import LEAST_LOGPROB, to_json
from .native import EncodedChoice, extend
from .prompt_side import SLICE_TOKENS, check_report, in_slices, structs_top

if TYPE_CHECKING:
    from .generation import Delta, Generation
    from .native import NativeRequest

Entry = tuple[float | None, int, str | None]
"""SGLang's log probability: value, token, perhaps text."""


class ScoredChoice(EncodedChoice):
    """A choice with likeliest or listed tokens, and texts."""

    def __init__(self, body: NativeRequest, token_text: Callable[[int], str]) -> None:
        super().__init__()
        self._entry = _entries(body, token_text)
        self._has_top, self._listed = bool(body.logprobs), body.logprob_token_ids

    def add_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        entry = self._entry
        pairs = zip(logprobs, token_ids, strict=True)
        extend(self.lists["output_token_logprobs"], [entry(token_id, one.logprob) for one, token_id in pairs])
        if self._listed:
            scores = [dict(one.top) for one in logprobs]
            lists = [[entry(token_id, one[token_id]) for token_id in self._listed] for one in scores]
            extend(self.lists["output_token_ids_logprobs"], lists)
        elif self._has_top:
            extend(
                self.lists["output_top_logprobs"], [[entry(*pair) for pair in one.top] for one in logprobs]
            )


def _entries(body: NativeRequest, token_text: Callable[[int], str]) -> Callable[[int, float | None], Entry]:
    text_of = token_text if body.return_text_in_logprobs else lambda _: None

    def entry(token_id: int, logprob: float | None) -> Entry:
        return None if logprob is None else max(logprob, LEAST_LOGPROB), token_id, text_of(token_id)

    return entry


async def add_prompt_side(
    items: Sequence[dict[str, Any]],
    whole: Iterable[Delta],
    generation: Generation,
    body: NativeRequest,
    token_text: Callable[[int], str],
) -> None:
    """Add log probabilities of prompt tokens from logprob_start_len on; the first has none.

    Raises ApiError as `check_report`.
    """
    start, entry = body.logprob_start_len or 0, _entries(body, token_text)
    for item, delta in zip(items, whole, strict=True):
        check_report(delta)
        ids = generation.prompt_of(delta.index)[start:]
        first, rest = [entry(ids[0], None)], zip(ids[1:], _scores(delta, start), strict=True)
        entries = (entry(token_id, one.logprob) for token_id, one in rest)
        item["meta_info"]["input_token_logprobs"] = await in_slices(_encoded(first, entries))
        if num := body.logprobs:
            tops = ([entry(*pair) for pair in structs_top(one, num).top] for one in _scores(delta, start))
            item["meta_info"]["input_top_logprobs"] = await in_slices(_encoded([None], tops))


def _scores(delta: Delta, start: int) -> Iterator[TokenLogprobs]:
    return islice((delta.prompt and delta.prompt.logprobs) or (), start, None)


def _encoded(first: list[Any], rest: Iterable[Any]) -> Iterator[bytes]:
    """JSON of a list in parts."""
    yield to_json(first)[:-1]
    part: list[Any] = []
    for one in rest:
        part.append(one)
        if len(part) == SLICE_TOKENS:
            yield b",%s" % to_json(part)[1:-1]
            part = []
    yield b",%s]" % to_json(part)[1:-1] if part else b"]"
