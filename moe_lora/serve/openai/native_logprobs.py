# SPDX-License-Identifier: Apache-2.0
"""Further log probabilities of /generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moe_lora.core.request import TokenLogprobs, token_logprobs

from .endpoints import LEAST_LOGPROB, to_json
from .native import EncodedChoice, extend
from .prompt_side import check_report, in_slices, structs_top

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
    for item, delta in zip(items, whole, strict=True):
        check_report(delta)
        await in_slices(_add(item["meta_info"], generation.prompt_of(delta.index), delta, body, token_text))


def _add(
    meta: dict[str, Any], ids: Sequence[int], delta: Delta, body: NativeRequest, text_of: Callable[[int], str]
) -> Iterator[bytes]:
    """One token at a time; the skipped tokens stay bytes."""
    start, num_top, entry = body.logprob_start_len or 0, body.logprobs, _entries(body, text_of)
    num, content = (delta.prompt and delta.prompt.scores) or (0, b"")
    scores = token_logprobs(num, memoryview(content)[8 * (num + 1) * start :])
    found, tops = bytearray(to_json([entry(ids[start], None)])[:-1]), bytearray(b"[null")
    for token_id, one in zip(ids[start + 1 :], scores, strict=True):
        found += b",%s" % to_json(entry(token_id, one.logprob))
        if num_top:
            tops += b",%s" % to_json([entry(*pair) for pair in structs_top(one, num_top).top])
        yield b""
    meta["input_token_logprobs"] = msgspec.Raw(found + b"]")
    if num_top:
        meta["input_top_logprobs"] = msgspec.Raw(tops + b"]")
