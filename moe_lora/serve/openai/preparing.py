# SPDX-License-Identifier: Apache-2.0
"""From a body's bytes to a request for the engine.

A separate process checks large bodies: Python's lock would delay all tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

from anyio import BrokenWorkerProcess, fail_after, to_process
from pydantic import ValidationError
from starlette.types import Scope

from moe_lora.config import LimitsConfig
from moe_lora.core.errors import ConfigError, FieldError
from moe_lora.core.host import return_memory
from moe_lora.core.request import MAX_REPORT_BYTES, ModelInfo, SamplingParams
from moe_lora.engine.text.text import LONG_TEXT_CHARS, with_end_tokens
from moe_lora.serve.access import caller_of
from moe_lora.serve.http_errors import ApiError, ContextLengthError, bad_request, describe_validation
from moe_lora.serve.limits import RETRY_S, Limits, client_of

from .checking_process import CheckingProcess
from .fields import shown_name
from .protocol import (
    PROMPT_FIELDS,
    STRUCTURED_FIELDS,
    THINKING,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    refuse_unknown,
    whole_characters,
)

if TYPE_CHECKING:
    from moe_lora.engine.client.messages import KnownAliases
    from moe_lora.engine.text.text import Tokenizer
    from moe_lora.serve.aliases import AliasChoice
    from moe_lora.serve.api_keys import ApiKey
    from moe_lora.serve.frontend import AdapterTexts

    from .parsers.choice import AnswerParsers
    from .structured import BodyGrammar

T = TypeVar("T")
_UNBOUNDED_ANSWER_TOKENS = 4096
"""Largest estimate without max_tokens: few answers fill the context."""
MAX_GRAMMARS = 64
"""Checked grammars of a front end."""
INLINE_BYTES = 1 << 14
"""Smaller bodies are checked inline, larger bodies in the other process."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Settings for every request."""

    info: ModelInfo
    limits: LimitsConfig
    adapter_texts: AdapterTexts | None
    aliases: AliasChoice | None = None

    @property
    def granted(self) -> tuple[str, ...]:
        """Adapters permitted by a right to an alias."""
        return () if self.aliases is None else tuple(self.aliases.granted)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request for the engine.

    body: without prompt or messages.  answer_tokens: most tokens by prompt.  parsers: None for a plain
    answer.  asked: a grammar to check.  grammar_field: of a checked grammar.  echo: text before each prompt's
    answer.  offsets: first and last character of each token; None for token ids.
    """

    body: SamplingFields
    sampling: SamplingParams
    prompts: list[tuple[int, ...]]
    answer_tokens: list[int]
    ignored: tuple[str, ...] = ()
    parsers: AnswerParsers | None = None
    asked: BodyGrammar | None = None
    grammar_field: str | None = None
    echo: tuple[str, ...] | None = None
    offsets: tuple[Sequence[tuple[int, int]] | None, ...] | None = None
    granted: tuple[str, ...] = ()

    def within(self, grammar: str) -> Prepared:
        """The request with a checked grammar."""
        assert self.asked is not None
        sampling = replace(self.sampling, grammar=grammar)
        return replace(self, sampling=sampling, asked=None, grammar_field=self.asked.field)


class Preparer:
    """Prepares one front end's requests, in one event loop.  tokenizer: None: token ids only.

    process: checks large bodies; None: starts with the first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        process: CheckingProcess | None = None,
        adapter_texts: Callable[[ApiKey | None], AdapterTexts] | None = None,
        aliases: KnownAliases | None = None,
        bases: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.adapter_texts = adapter_texts
        self.aliases, self.bases = aliases, bases
        self._limits = limits
        self._process = process or CheckingProcess(tokenizer)
        self._alone = asyncio.Lock()
        self._grammars: dict[str, str] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def prepare(
        self, kind: type[SamplingFields], content: bytearray, info: ModelInfo, scope: Scope
    ) -> Prepared:
        """The body's request.  Raises ApiError for the first problem."""
        texts = None if self.adapter_texts is None else self.adapter_texts(caller_of(scope).key)
        bounds = Bounds(info=info, limits=self._limits.config, adapter_texts=texts)
        if self.aliases is not None and self.aliases.live:
            from moe_lora.serve.aliases import choice_of

            bounds = replace(bounds, aliases=choice_of(self.aliases.live, self.bases, scope))
        client, body = client_of(scope), cast("SamplingFields | None", None)
        try:
            if len(content) >= INLINE_BYTES:
                args = kind, bytes(content), self.tokenizer, bounds
                return await self.elsewhere(client, prepare_now, *args)
            body, tokenizer = parse(kind, content, bounds), self.tokenizer
            if texts is not None and texts.has(body.model):
                tokenizer = await asyncio.to_thread(tokenizer_of, body.model, tokenizer, bounds)
            sampling, prompts = asked_of(body, tokenizer, bounds)
            add_special = cast("Any", body).add_special_tokens
            token_ids = [
                await self._encode(prompt, add_special) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
            request = prepared(body, sampling, token_ids, tokenizer, bounds)
            if body.renders:
                request = await asyncio.to_thread(_with_offsets, request, prompts, tokenizer, add_special)
            return await self._within_grammar(request, client) if request.asked else request
        except ApiError as error:
            if error.limit is not None:
                self._limits.count(error.limit)
            raise (error if body is None else body.renamed(error)) from error.__cause__

    async def _within_grammar(self, request: Prepared, client: str) -> Prepared:
        """The request with its grammar; the other process checks a new one."""
        from .structured import checked_grammar

        asked, key = request.asked, json.dumps(request.asked)
        grammar = self._grammars.pop(key, "") or await self.elsewhere(client, checked_grammar, asked)
        self._grammars[key] = grammar
        if len(self._grammars) > MAX_GRAMMARS:
            del self._grammars[next(iter(self._grammars))]
        return request.within(grammar)

    async def _encode(self, prompt: str, add_special: bool) -> Sequence[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise no_tokenizer("a text prompt")
        if len(prompt) < LONG_TEXT_CHARS:
            return tokenizer.encode(prompt, add_special_tokens=add_special)
        return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens=add_special)

    async def elsewhere(self, client: str, check: Callable[..., T], *args: Any) -> T:
        """Call `check` in the other process: clients take turns, with one queued body each."""
        limits = self._limits
        turn = self._turns.setdefault(client, asyncio.Lock())
        try:
            with fail_after(limits.config.check_timeout_s):
                async with turn, self._alone:
                    await self._process.ready()
                    return await to_process.run_sync(check, *args, cancellable=True)
        except TimeoutError:
            what = "checks of large requests and grammars take too long; send this one again later"
            raise limits.refusal("check_time", ApiError(503, what, retry_s=RETRY_S)) from None
        except (BrokenWorkerProcess, OSError) as error:
            what = "the process that checks requests ended, or can't be started; send this one again"
            raise limits.refusal("check_time", ApiError(503, what, retry_s=RETRY_S)) from error


def prepare_now(
    kind: type[SamplingFields], content: bytes, tokenizer: Tokenizer | None, bounds: Bounds
) -> Prepared:
    """As `Preparer.prepare`, inline; returns free memory."""
    body = cast("SamplingFields | None", None)
    try:
        body = parse(kind, content, bounds)
        tokenizer = tokenizer_of(body.model, tokenizer, bounds)
        sampling, prompts = asked_of(body, tokenizer, bounds)
        add_special = cast("Any", body).add_special_tokens
        token_ids = encoded(prompts, tokenizer, add_special=add_special)
        request = prepared(body, sampling, token_ids, tokenizer, bounds)
        if body.renders:
            request = _with_offsets(request, prompts, tokenizer, add_special)
        del prompts
        if request.asked is None:
            return request
        from .structured import checked_grammar

        return request.within(checked_grammar(request.asked))
    except ApiError as error:
        raise (error if body is None else body.renamed(error)) from error.__cause__
    finally:
        return_memory()


def encoded(
    prompts: Sequence[str | list[int]], tokenizer: Tokenizer | None, *, add_special: bool
) -> list[Sequence[int]]:
    """Token ids of texts and token ids.  Raises ApiError for a text without a tokenizer."""
    found: list[Sequence[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(prompt)
        elif tokenizer is None:
            raise no_tokenizer("a text prompt")
        else:
            found.append(tokenizer.encode(prompt, add_special_tokens=add_special))
    return found


def parse(kind: type[SamplingFields], content: bytes | bytearray, bounds: Bounds) -> SamplingFields:
    """The body up to its first error.  Raises ApiError."""
    max_depth = bounds.limits.max_json_depth
    try:
        data = json.loads(content)
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # invalid UTF-8, or too long a number
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}") from None
    if content.count(b"[") + content.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise _too_deep(max_depth)
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise describe_validation(error).renamed(kind.NAMES) from None
    if bounds.limits.unknown_fields == "error":
        refuse_unknown(body)
    if bounds.aliases is not None:
        if body.model is not None:
            body.model = bounds.aliases.adapter(body.model, data)
        for term in getattr(body, "lora", None) or ():
            term.name = bounds.aliases.adapter(term.name, data)
    return body


def _too_deep(max_depth: int) -> ApiError:
    what = f"the body's lists and objects lie more than {max_depth} deep in each other"
    return bad_request(what, limit="json_depth")


def _is_deeper(data: Any, max_depth: int) -> bool:
    level = [data]
    for _ in range(max_depth):
        level = [
            inner
            for one in level
            if type(one) in (list, dict)
            for inner in (one.values() if type(one) is dict else one)
            if type(inner) in (list, dict)
        ]
        if not level:
            return False
    return True


def tokenizer_of(model: str | None, tokenizer: Tokenizer | None, bounds: Bounds) -> Tokenizer | None:
    """The tokenizer with the adapter's text files.  Raises ApiError."""
    if bounds.adapter_texts is None or tokenizer is None or model is None:
        return tokenizer
    try:
        return bounds.adapter_texts.applied(model, tokenizer, bounds.granted)
    except ConfigError as error:
        raise bad_request(f"the text files of adapter {model!r} can't be used: {error}", "model") from error


def no_tokenizer(purpose: str) -> ApiError:
    return bad_request(
        f"{purpose} needs a tokenizer, but this server has none; "
        "send prompts as token ids to /v1/completions",
    )


def asked_of(
    body: SamplingFields, tokenizer: Tokenizer | None, bounds: Bounds
) -> tuple[SamplingParams, Sequence[str | list[int]]]:
    """Sampling parameters and prompts.  Raises ApiError."""
    defaults, most = bounds.info.sampling_defaults, bounds.limits.max_choices
    if bounds.limits.return_routed_experts and body.shows_experts:
        defaults = {**defaults, "routed_experts": True}
    if isinstance(body, ChatRequest):
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(logprobs, limit, defaults)
        chats = body.conversations
        if len(chats) * body.num_choices > most:
            raise _too_many_choices(len(chats), body.num_choices, most)
        if tokenizer is None:
            raise no_tokenizer("/v1/chat/completions")
        if body.kv_transfer_params:
            from .forwarded_prompt import forwarded_prompt

            return sampling, [forwarded_prompt(body, bounds.info.vocab_size)]
        return sampling, [rendered(chat, tokenizer) for chat in chats]
    assert isinstance(body, CompletionRequest)
    scores = body.echo or body.prompt_logprobs is not None
    limit = 1 if scores and body.max_tokens == 0 else body.max_tokens
    sampling = body.sampling(body.logprobs, limit, defaults)
    if tokenizer is None and (sampling.stop or sampling.bad_words):
        raise no_tokenizer("a list of stop strings" if sampling.stop else "bad_words")
    prompts = body.prompts
    if len(prompts) * body.num_choices > most:
        raise _too_many_choices(len(prompts), body.num_choices, most)
    return sampling, prompts


def _too_many_choices(num_prompts: int, num_choices: int, most: int) -> ApiError:
    what = f"{num_prompts} prompts with n={num_choices} make more than {most} choices; send several requests"
    return bad_request(what, "n", limit="choices")


def rendered(body: ChatRequest, tokenizer: Tokenizer) -> str:
    """The conversation as the template's text.  Raises ApiError."""
    messages = [message.for_template() for message in body.messages]
    if any("tool_calls" in message for message in messages):
        from .parsers.requests import with_fit_arguments

        messages = with_fit_arguments(messages, tokenizer, body.chat_template or None)
    continues, opens = bool(body.continue_final_message), body.add_generation_prompt
    try:
        text = tokenizer.render_chat(
            messages,
            name=body.chat_template or None,
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
            variables=body.template_variables,
        )
        if (field := body.thinking_field) is not None:
            _check_read(field, body, tokenizer)
        return whole_characters(text)
    except (ValueError, RecursionError) as error:
        raise bad_request(str(error), error.param if isinstance(error, FieldError) else "messages") from error


def _check_read(field: str, body: ChatRequest, tokenizer: Tokenizer) -> None:
    """Raises FieldError for a template without a variable of `THINKING`."""
    templates = tokenizer.chat_templates
    if templates is None or not templates.reads(body.chat_template or None, body.tools).isdisjoint(THINKING):
        return
    raise FieldError(
        field,
        f"{field} has no effect: the chat template reads neither {' nor '.join(THINKING)}; leave it out, or "
        "set the template's own variable in chat_template_kwargs",
    )


def _check_work(
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
    answer_tokens: Sequence[int],
    body: SamplingFields,
    bounds: Bounds,
) -> None:
    """Raises ApiError above max_request_tokens; log probabilities of other tokens count."""
    info, most, scored = bounds.info, bounds.limits.max_request_tokens, sampling.prompt_logprobs
    others = info.vocab_size if sampling.logprobs == -1 else sampling.logprobs or 0
    others = len(sampling.logprob_token_ids) or others
    scores = 0 if scored is None else 1 + (info.vocab_size if scored == -1 else scored)
    scores += max(map(len, sampling.prompt_logprob_token_ids), default=0)
    work = body.num_choices * (sum(map(len, prompts)) * (1 + scores) + sum(answer_tokens) * (1 + others))
    if work > most:
        what = f"all choices of the request may take {work} tokens, log probabilities of others included, "
        what += f"more than the {most} of one request; lower max_tokens, n, logprobs or prompt_logprobs"
        raise bad_request(what, "max_tokens", limit="request_tokens")
    if (num_bytes := 8 * scores * max(map(len, prompts))) > MAX_REPORT_BYTES:
        what = f"log probabilities of a prompt have {num_bytes} bytes, more than the {MAX_REPORT_BYTES} "
        what += "of one message; shorten the prompt, or ask for fewer log probabilities"
        param = "prompt_logprobs" if scored == body.prompt_logprobs else "logprobs"
        raise bad_request(what, param, limit="request_tokens")


def prepared(
    body: SamplingFields,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer | None,
    bounds: Bounds,
) -> Prepared:
    """The request for the engine.

    Raises ApiError beyond the context, and for too many tokens.
    """
    info, echo = bounds.info, None
    if not PROMPT_FIELDS.isdisjoint(body.model_fields_set):
        from .prompt_side import prompt_side

        sampling, prompts, echo = prompt_side(body, sampling, prompts, tokenizer, info)
    for token_ids in prompts:
        check_prompt(token_ids, sampling, info)
    if any(not 0 <= one < info.vocab_size for one in sampling.stop_token_ids):
        raise _unknown_token("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    if any(one >= info.vocab_size for one in sampling.logprob_token_ids):
        raise _unknown_token("logprob_token_ids", sampling.logprob_token_ids, info.vocab_size)
    sampling = for_engine(sampling, max(map(len, prompts)), body.default_max_tokens, tokenizer, info)
    limit, room = sampling.max_tokens, info.max_model_len
    answer_tokens = [limit or min(room - len(one), _UNBOUNDED_ANSWER_TOKENS) for one in prompts]
    scored = sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids
    if body.num_choices * len(prompts) > 1 or scored or sampling.logprobs or sampling.logprob_token_ids:
        _check_work(sampling, prompts, answer_tokens, body, bounds)
    ignored: tuple[str, ...] = ()
    if body.model_extra or body.stream_options is not None:
        ignored = tuple(map(shown_name, body.unknown_fields()))
        body.drop_unknown()
    chat = body.as_chat
    parsers = None if chat is None else _parsers(chat, prompts, tokenizer, bounds)
    if body.adapts_parsers:
        parsers = cast("Any", body).adapted(parsers)
    if chat is not None and chat.thinking_token_budget is not None:
        sampling = _limited(sampling, chat.thinking_token_budget, parsers, tokenizer, prompts[0])
    asked = None
    if (parsers and parsers.has_strict) or not STRUCTURED_FIELDS.isdisjoint(body.model_fields_set):
        from .structured import body_grammar

        asked = body_grammar(body, tokenizer, parsers)
    return Prepared(
        body=body.without_prompt(),
        granted=() if bounds.aliases is None else bounds.granted,
        sampling=sampling,
        prompts=[tuple(one) for one in prompts],
        answer_tokens=answer_tokens,
        ignored=ignored,
        parsers=parsers,
        asked=asked,
        echo=echo,
    )


def _with_offsets(
    request: Prepared, prompts: Sequence[str | list[int]], tokenizer: Tokenizer | None, add_special: bool
) -> Prepared:
    from .prompt_side import with_offsets

    return with_offsets(request, prompts, tokenizer, add_special=add_special)


def _parsers(
    body: ChatRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer | None, bounds: Bounds
) -> AnswerParsers | None:
    config = bounds.limits
    is_joined = config.reasoning_parser == "none" or body.separate_reasoning is False
    is_plain = is_joined and body.include_reasoning is not False
    if tokenizer is None or (is_plain and (not body.tools or body.tool_choice == "none")):
        return None
    from .parsers.choice import parsers_for

    return parsers_for(body, tuple(prompts[0]), tokenizer, config, bounds.info.tool_format)


def _limited(
    sampling: SamplingParams,
    budget: int,
    parsers: AnswerParsers | None,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
) -> SamplingParams:
    """The parameters with a reasoning limit; budget -1: none."""
    from .parsers.choice import thinking_limit

    if budget < 0:
        return sampling
    return replace(sampling, thinking=thinking_limit(parsers, budget, tokenizer, prompt))


def for_engine(
    sampling: SamplingParams,
    longest_prompt: int,
    default_max_tokens: int | None,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
) -> SamplingParams:
    """The parameters for the engine.

    default_max_tokens: within the context; None: the rest of the context.  Adds the tokenizer's end tokens,
    unless ignored.  top_k beyond the vocabulary becomes 0.
    """
    if sampling.max_tokens is None and default_max_tokens is not None:
        default = max(default_max_tokens, sampling.min_tokens)
        sampling = replace(sampling, max_tokens=min(default, info.max_model_len - longest_prompt))
    if sampling.top_k >= info.vocab_size:
        sampling = replace(sampling, top_k=0)
    if sampling.edits_logits:
        sampling = _edited(sampling, tokenizer, info)
    if tokenizer is None or {*tokenizer.eos_token_ids} <= {*info.eos_token_ids}:
        return sampling
    return with_end_tokens(sampling, tokenizer, info)


def _edited(sampling: SamplingParams, tokenizer: Tokenizer | None, info: ModelInfo) -> SamplingParams:
    """The parameters with bad words as token ids.  Raises ApiError for unknown ids."""
    if tokenizer is not None and sampling.bad_words:
        ids = tokenizer.bad_word_ids(sampling.bad_words)
        sampling = replace(sampling, bad_words=(), bad_word_ids=ids)
    for name, token_ids in sampling.edited_ids():
        wrong = next((one for one in token_ids if not 0 <= one < info.vocab_size), None)
        if wrong is not None:
            raise _unknown_token(name, [wrong], info.vocab_size)
    return sampling


def check_prompt(
    token_ids: Sequence[int], sampling: SamplingParams, info: ModelInfo, name: str = "prompt"
) -> None:
    """Raises ApiError for an empty or too long prompt, and unknown token ids."""
    limit, num_tokens = info.max_model_len, len(token_ids)
    num_read = num_tokens - sampling.hidden_state
    if not token_ids:
        raise bad_request(f"{name} has no tokens; give at least one", name)
    length = f"This model's maximum context length is {limit} tokens."
    if num_read >= limit:
        what = f"{length} However, the prompt has {num_tokens} tokens"
        what += "" if sampling.hidden_state else ", and the answer needs one"
        raise ContextLengthError(400, f"{what}; shorten {name}", name)
    for bound in ("max_tokens", "min_tokens"):
        asked = getattr(sampling, bound) or 0
        if num_read + asked > limit:
            what = f"{length} However, the prompt has {num_tokens} tokens, and {bound}={asked}"
            raise ContextLengthError(400, f"{what}; shorten the prompt or lower {bound}", bound)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise _unknown_token(name, token_ids, info.vocab_size)


def _unknown_token(name: str, token_ids: Sequence[int], vocab_size: int) -> ApiError:
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    return out_of_vocabulary(name, wrong, vocab_size)


def out_of_vocabulary(name: str, token_id: int, vocab_size: int) -> ApiError:
    allowed = f"the {vocab_size} token ids go from 0 to {vocab_size - 1}"
    return bad_request(f"{name}: token id {token_id} is out of vocabulary; {allowed}", name)
