# SPDX-License-Identifier: Apache-2.0
"""Answers within a grammar: threads compute masks beside steps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moe_lora.core.request import UNFOLLOWABLE, FinishReason, GenerateRequest, ModelInfo, TokenOutput
from moe_lora.engine.sequence import Sequence
from moe_lora.engine.text.grammars import MAX_PROBLEM_CHARS, grammar_tokenizer, matcher_of
from moe_lora.engine.text.text import load_tokenizer

from .logit_edits import EditedSequence, Mask, bits_of
from .sampler import Take

NUM_COMPILED = 64
"""Compiled grammars kept."""
MAX_COMPILED_CHARS = 1 << 20
"""Limit of kept grammars' texts: a large grammar takes tens of megabytes."""
NUM_THREADS = 2
SLOW_S = 0.005
"""The step does not wait for a slower mask."""
SOON_S = 0.0005
"""A step's wait for a mask with perhaps a single token."""
ALL_SOON_S = 0.002
"""The limit for a step's tokens without an alternative."""
BITS = 32


Threads: TypeAlias = tuple[ThreadPoolExecutor, ThreadPoolExecutor]
"""For quick masks and for slow masks."""


def sole_token(words: np.ndarray) -> int | None:
    """The token of a mask that allows a single token."""
    (places,) = words.nonzero()
    if len(places) != 1 or (bits := int(words[places[0]])) & (bits - 1):
        return None
    return BITS * int(places[0]) + bits.bit_length() - 1


class Follower:
    """A grammar's state after the answer so far.

    ends: tokens that may end an answer.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, ends: Seq[int], eos: Seq[int], vocab_size: int
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._ends, self._eos = tuple(ends), tuple(eos)
        self._vocab_size = vocab_size
        self._is_complete = False

    def advance(self, tokens: Seq[int]) -> Mask:
        """The mask after further tokens."""
        matcher, words = self._matcher, np.zeros(-(-self._vocab_size // BITS), dtype=np.uint32)
        for token in tokens:
            if self._is_complete:
                break
            self._is_complete = token in self._ends and matcher.is_accepting()
            if not self._is_complete and not matcher.consume_token(token):
                break
        allowed: tuple[int, ...] = ()
        forced: tuple[int, ...] = ()
        if self._is_complete or (matcher.is_stopped() and not matcher.is_error()):
            self._is_complete = True
            allowed = forced = self._ends or self._eos
        else:
            found = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: len(words)]
            words[: len(found)] = found
            only = sole_token(words)
            if only is not None and not matcher.validate_tokens([only]):
                # llguidance forces an added token of the same text, and then refuses the token.
                text = matcher.compute_ff_bytes()
                width = 1 + sum(text[:1] >= lead for lead in (b"\xc0", b"\xe0", b"\xf0"))
                starts = (self._tokenizer.tokenize_bytes(text[:end])[:1] for end in (width, 1))
                start = next(filter(matcher.validate_tokens, starts), [])
                words = bits_of(start, self._vocab_size)
            for token in self._eos:
                words[token // BITS] &= ~np.uint32(1 << token % BITS)
            allowed = self._ends if matcher.is_accepting() else ()
        for token in allowed:
            words[token // BITS] |= np.uint32(1 << token % BITS)
        problem = None
        if matcher.is_error() or not words.any():
            why = matcher.get_error() or "no token of the vocabulary continues the answer"
            problem = f"{UNFOLLOWABLE}: {why[:MAX_PROBLEM_CHARS]}"
        return Mask(words, forced, problem)


class GrammarSequence(EditedSequence):
    """A sequence within a grammar; held while a slow mask is computed."""

    _is_held = _is_slow = False

    def follow(self, follower: Follower, threads: Threads, wake: Callable[[], None]) -> None:
        """Start the first mask.  wake: called after a slow mask, from a thread."""
        self._follower, self._threads, self._wake = follower, threads, wake
        self._is_slow = True
        self._submit(self.request.generated, None)

    @property
    def held(self) -> bool:
        return self._is_held or (self._is_slow and not self._next.done())

    @held.setter
    def held(self, held: bool) -> None:
        self._is_held = held

    @property
    def is_held_by_order(self) -> bool:
        return self._is_held

    def extend(self, tokens: Seq[int]) -> None:
        super().extend(tokens)
        self._submit(tokens, self._next)

    def append(self, token: int, now_s: float, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        reason = super().append(token, now_s, eos_token_ids)
        if reason is None:
            self._submit((token,), None)
        return reason

    def only_token(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> int | None:
        """The next token if its mask soon allows a single token."""
        try:
            self._next.result(max(0.0, self._asked_s + SOON_S - time.monotonic()))
        except Exception:  # late, or failed: the step's draw handles both
            return None
        words, _, problem = self._mask(vocab_size, eos_token_ids)
        return sole_token(words) if problem is None else None

    def _submit(self, tokens: Seq[int], before: Future[Mask] | None) -> None:
        spent_s = 0.0

        def advance() -> Mask:
            nonlocal spent_s
            if before is not None:
                before.exception()  # began earlier, in these threads
            began_s = time.thread_time()
            try:
                return self._follower.advance(tokens)
            finally:
                spent_s = time.thread_time() - began_s

        was_slow, self._asked_s = self._is_slow, time.monotonic()

        def note(done: Future[Mask]) -> None:
            # The mask before may be found slow.
            is_awaited, self._is_slow = was_slow or self._is_slow, spent_s > SLOW_S
            if is_awaited:
                self._wake()

        self._next = self._threads[was_slow or before is not None].submit(advance)
        self._next.add_done_callback(note)

    def _mask(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Mask:
        """Waits for the thread."""
        if error := self._next.exception():
            words = np.zeros(-(-vocab_size // BITS), dtype=np.uint32)
            return Mask(words, problem=f"{UNFOLLOWABLE}: {str(error)[:MAX_PROBLEM_CHARS]}")
        found, other = self._next.result(), super()._mask(vocab_size, eos_token_ids)
        if other is None or found.problem is not None:
            return found
        words = found.words & other.words
        if not words.any() and self._may_close_later():
            return found
        if found.forced:
            words |= bits_of(found.forced, vocab_size)
        return found._replace(words=words)


class Grammars:
    """Compiled grammars of one engine.  wake: lets the engine look at its requests."""

    def __init__(self, info: ModelInfo, wake: Callable[[], None]) -> None:
        self._info, self._wake = info, wake
        self._threads: Threads = (
            ThreadPoolExecutor(NUM_THREADS, "grammar-masks"),
            ThreadPoolExecutor(NUM_THREADS, "slow-grammar-masks"),
        )
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: str, compiled: Future[LLMatcher] | None = None) -> Future[LLMatcher]:
        """The grammar's matcher at its start; copy before use."""
        found = self._compiled.get(grammar, compiled) or self._compiler.submit(self._compile, grammar)
        self._compiled[grammar] = found
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > NUM_COMPILED or sum(map(len, self._compiled)) > MAX_COMPILED_CHARS:
            self._compiled.popitem(last=False)
        return found

    def sequence(self, request: GenerateRequest, *rest: Any) -> GrammarSequence:
        """A sequence within the request's grammar.  Raises ValueError."""
        info, sampling = self._info, request.sampling
        assert sampling.grammar is not None
        compiled = self.compile(sampling.grammar)
        if error := compiled.exception():
            self._compiled.pop(sampling.grammar, None)
            raise ValueError(str(error)[:MAX_PROBLEM_CHARS])
        matcher = compiled.result().deep_copy()
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids)}
        made = GrammarSequence(request, *rest)
        follower = Follower(matcher, self._tokenizer, sorted(ends), info.eos_token_ids, info.vocab_size)
        made.follow(follower, self._threads, self._wake)
        return made

    def only_tokens(self, running: Iterable[Sequence], take: Take) -> list[TokenOutput]:
        """Take tokens without an alternative; a later step computes them with the next.

        Leaves requests with reports out.
        """
        gains: list[TokenOutput] = []
        end_s = time.monotonic() + ALL_SOON_S
        for sequence in [one for one in running if isinstance(one, GrammarSequence)]:
            has_report = sequence.record is not None or sequence.request.sampling.logprobs is not None
            if sequence.held or has_report or sequence.tokens[-1] < 0 or sequence.num_uncomputed != 1:
                continue
            while time.monotonic() < end_s:
                token = sequence.only_token(self._info.vocab_size, self._info.eos_token_ids)
                if token is None or token >= self._info.vocab_size:
                    break
                gains.append(take(sequence, token))
                if gains[-1].finish_reason is not None:
                    break
        return gains

    def _compile(self, grammar: str) -> LLMatcher:
        return matcher_of(grammar, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = load_tokenizer(self._info.model_dir)
        if tokenizer is None:
            raise ValueError("a grammar needs a tokenizer, but the model's directory has none")
        return grammar_tokenizer(tokenizer, self._info.vocab_size, self._info.eos_token_ids)
