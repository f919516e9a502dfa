# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens with KV from earlier requests on one simulated instance."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from .running import SimRequest


class PrefixHits(Protocol):
    """A request computes its prompt without the tokens of a match, but at least one token."""

    def match(self, request: SimRequest) -> int:
        """Tokens of the prompt with KV on the instance."""
        ...

    def add(self, request: SimRequest, free_tokens: float) -> None:
        """The request has ended, and the instance has room for free_tokens of cached KV."""
        ...


@dataclass(frozen=True, kw_only=True)
class StatedHits:
    """Every prompt finds this share of its tokens."""

    share: float

    def match(self, request: SimRequest) -> int:
        return min(int(self.share * request.prompt_tokens), request.prompt_tokens - 1)

    def add(self, request: SimRequest, free_tokens: float) -> None:
        """A stated share depends on no request."""


class BlockHits:
    """Finds the longest prefix in blocks of ended requests with the same adapter.

    Blocks are evicted least recently used first, down to the KV without running requests.
    block_tokens: tokens of one hash id.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[tuple[str | None, int], None] = OrderedDict()

    def match(self, request: SimRequest) -> int:
        keys = ((request.adapter, block) for block in request.hash_ids)
        found = list(takewhile(self._blocks.__contains__, keys))
        for key in reversed(found):
            self._blocks.move_to_end(key)
        return max(0, min(len(found) * self._block_tokens, request.prompt_tokens - 1))

    def add(self, request: SimRequest, free_tokens: float) -> None:
        for block in reversed(request.hash_ids):  # the first block is the last one to be evicted
            key = request.adapter, block
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) * self._block_tokens > free_tokens:
            self._blocks.popitem(last=False)
