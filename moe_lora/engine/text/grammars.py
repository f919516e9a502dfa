# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers as texts, and a tokenizer for masks; by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from .text import REPLACEMENT

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from .text import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 17
"""A longer text may compile for seconds."""
MAX_PROBLEM_CHARS = 300
JSON_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
}
"""Refuses keywords without an effect, and bounds white space: a model may repeat it."""
limits = partial(LLParserLimits, max_grammar_size=100_000, step_lexer_fuel=200_000, verbose_errors=False)


def json_grammar(schema: Any, *, lenient: bool = False) -> str:
    """Grammar of JSON texts under a schema: an object, a boolean, or either as text.  Raises ValueError.

    lenient: leave keywords without an effect out.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not valid JSON: {str(error)[:MAX_PROBLEM_CHARS]}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is a {type(schema).__name__}; give an object")
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return LLMatcher.grammar_from_json_schema(_bounded(text), overrides={**JSON_OPTIONS, "lenient": lenient})


def regex_grammar(pattern: str) -> str:
    """Grammar of texts that match the whole pattern (Rust's regex)."""
    return LLMatcher.grammar_from_regex(_bounded(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of these texts."""
    if not choices:
        raise ValueError("the list of choices is empty; give at least one text")
    return grammar_from("choice", _bounded(json.dumps(list(choices))))


def text_grammar(text: str) -> str:
    """Grammar in Lark's or GBNF's syntax.  Raises ValueError."""
    return grammar_from("grammar", _bounded(text))


def after(rules: str, grammar: str) -> str:
    """The grammar behind Lark rules that name it @answer.  "": alone."""
    return composed(rules, {"answer": grammar}) if rules else grammar


def composed(rules: str, inner: Mapping[str, str]) -> str:
    """Lark rules with the grammars they name.  Inner grammars need other names."""
    listed: list[dict[str, Any]] = [{"lark_grammar": rules}]
    for name, grammar in inner.items():
        given = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        listed += ({**given[0], "name": name}, *given[1:])
    return json.dumps({"grammars": listed})


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are compiled")
    return text


def check_grammar(grammar: str) -> None:
    """Raises ValueError for a grammar that does not compile within the limits."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(_bounded(grammar), limits=limits())
    if is_wrong:
        raise _uncompiled("; ".join(messages))
    matcher_of(grammar, LLTokenizer(TokenizerWrapper(_Bytes())))


def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The grammar's matcher before the first token.  Raises ValueError."""
    matcher = LLMatcher(tokenizer, grammar, limits=limits(), log_level=0)
    if matcher.is_error():
        raise _uncompiled(matcher.get_error())
    return matcher


def _uncompiled(problem: str) -> ValueError:
    return ValueError(f"the grammar can't be compiled: {problem[:MAX_PROBLEM_CHARS].strip()}")


def grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """The vocabulary as bytes.  ends: tokens that end an answer."""
    size, backend = max(vocab_size, tokenizer.vocab_size), tokenizer.backend
    # Without an end token, a number beyond the vocabulary stands for the end.
    found = list(ends) or [size]
    try:
        return LLTokenizer(backend.to_str(), n_vocab=size + (not ends), eos_token=found)
    except ValueError:  # a decoder unknown to llguidance
        return LLTokenizer(TokenizerWrapper(_DecodedTokens(tokenizer, size, found)), eos_token=found)


def mark_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> id of tokens that no grammar's text spells: special tokens, and <…>."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content[:1], token.content[-1:]) == ("<", ">")
    }


ANY_MARK = "<[257]>"
"""A special token in checks."""


class _Bytes:
    """Single bytes, an end and a mark, for `TokenizerWrapper`."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256, 257)
    tokens = (*(bytes([one]) for one in range(256)), b"", b"")

    def __call__(self, text: str | bytes) -> Iterable[int]:
        return text.encode() if isinstance(text, str) else text


class _DecodedTokens:
    """Bytes by decoding each token, for `TokenizerWrapper`."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        special = {*mark_ids(tokenizer).values(), *ends}
        self.special_token_ids = sorted(special)
        self._tokenizer = tokenizer
        texts = map(tokenizer.token_text, range(vocab_size))
        self.tokens = [
            b"" if one in special or REPLACEMENT in text else text.encode() for one, text in enumerate(texts)
        ]
        self.tokens += [b""] * (max(special, default=0) + 1 - vocab_size)

    def __call__(self, text: str) -> Iterable[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
