"""How many tokens each adapter had."""

from __future__ import annotations

from collections import Counter


class TokenMeter:
    """Tokens of each adapter since they were last taken.  Not thread-safe: fed and read from one thread."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def add(self, adapter: str | None, num_tokens: int) -> None:
        """Tokens that came in or went out for the adapter; the base model (None) is on every server."""
        if adapter is not None:
            self._tokens[adapter] += num_tokens

    def take(self) -> Counter[str]:
        """What was counted; counting begins anew."""
        taken, self._tokens = self._tokens, Counter()
        return taken
