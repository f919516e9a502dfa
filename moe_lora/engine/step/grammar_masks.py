# SPDX-License-Identifier: Apache-2.0
"""Answers within a grammar: threads compute the mask of each next token beside steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from moe_lora.core.request import UNFOLLOWABLE, FinishReason, GenerateRequest, ModelInfo
from moe_lora.engine.text.grammars import MAX_PROBLEM_CHARS, grammar_tokenizer, limits
from moe_lora.engine.text.text import load_tokenizer

from .logit_edits import EditedSequence

NUM_COMPILED = 64
"""Compiled grammars that are kept."""
NUM_THREADS = 2
BITS = 32


class Mask(NamedTuple):
    """words: [ceil(V / 32)] int32, bit i of word w allows token 32 w + i.  forced: tokens of a complete
    answer, allowed even below min_tokens.
    """

    words: np.ndarray
    forced: tuple[int, ...] = ()
    problem: str | None = None


class Follower:
    """A grammar's state after the answer so far.

    ends: tokens that may end a complete answer.  eos: the model's end tokens.
    """

    def __init__(self, matcher: LLMatcher, ends: Seq[int], eos: Seq[int], vocab_size: int) -> None:
        self._matcher = matcher
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
            for token in self._eos:
                words[token // BITS] &= ~np.uint32(1 << token % BITS)
            allowed = self._ends if matcher.is_accepting() else ()
        for token in allowed:
            words[token // BITS] |= np.uint32(1 << token % BITS)
        if matcher.is_error() or not words.any():
            return self.failed(matcher.get_error() or "no token of the vocabulary continues the answer")
        return Mask(words.view(np.int32), forced)

    def failed(self, why: str) -> Mask:
        words = np.full(-(-self._vocab_size // BITS), -1, dtype=np.int32)
        return Mask(words, problem=f"{UNFOLLOWABLE}: {why[:MAX_PROBLEM_CHARS]}")


class GrammarSequence(EditedSequence):
    """A sequence within a grammar."""

    def follow(self, follower: Follower, threads: ThreadPoolExecutor) -> None:
        """Start to compute the first mask."""
        self._follower, self._threads = follower, threads
        self._mask = threads.submit(follower.advance, self.request.generated)

    def mask(self) -> Mask:
        """Of the next token; waits for the thread."""
        error = self._mask.exception()
        found = self._mask.result() if error is None else self._follower.failed(str(error))
        self.problem = found.problem
        return found

    def append(self, token: int, now_s: float, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        reason = super().append(token, now_s, eos_token_ids)
        if self.problem is not None:
            return "error"
        if reason is None:
            self._mask = self._threads.submit(self._follower.advance, (token,))
        return reason


class Grammars:
    """Compiled grammars of one engine, the latest used."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: str, compiled: Future[LLMatcher] | None = None) -> Future[LLMatcher]:
        """The grammar's matcher at its start, perhaps later; copy before use.

        compiled: of an earlier call, perhaps forgotten since.
        """
        found = self._compiled.get(grammar, compiled) or self._threads.submit(self._compile, grammar)
        self._compiled[grammar] = found
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > NUM_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def sequence(self, request: GenerateRequest, *rest: Any) -> GrammarSequence:
        """A sequence within the request's grammar.  Raises ValueError for a grammar that does not compile."""
        info, sampling = self._info, request.sampling
        assert sampling.grammar is not None
        compiled = self.compile(sampling.grammar)
        if error := compiled.exception():
            raise ValueError(str(error)[:MAX_PROBLEM_CHARS])
        matcher = compiled.result().deep_copy()
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids)}
        made = GrammarSequence(request, *rest)
        made.follow(Follower(matcher, sorted(ends), info.eos_token_ids, info.vocab_size), self._threads)
        return made

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, limits=limits(), log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar can't be compiled: {matcher.get_error()[:MAX_PROBLEM_CHARS]}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = load_tokenizer(self._info.model_dir)
        if tokenizer is None:
            raise ValueError("a grammar needs a tokenizer, but the model's directory has none")
        return grammar_tokenizer(tokenizer, self._info.vocab_size, self._info.eos_token_ids)
