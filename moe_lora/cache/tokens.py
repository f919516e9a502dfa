"""Token ids as bytes: compared and hashed much faster than a tuple of them, in a fifth of its memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence

TOKEN_BYTES = 8
ENCODED_AT_ONCE = 512
"""Tokens of a prompt that are encoded before any is looked for."""


def encode(tokens: Sequence[int]) -> bytes:
    """The ids as int64 in the machine's order."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def encode_more(encoded: bytes, tokens: Sequence[int], most: int, num_bytes: int) -> bytes:
    """`encoded`, the beginning of the first `most` tokens, lengthened to at least `num_bytes` if they go so
    far; at least doubled, since most of a long prompt is usually new and never looked for.
    """
    done = len(encoded) // TOKEN_BYTES
    upto = min(most, max(2 * done, ENCODED_AT_ONCE, num_bytes // TOKEN_BYTES))
    return encoded + encode(tokens[done:upto]) if upto > done else encoded
