# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine, outputs, and counters."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from operator import index, methodcaller
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
AdapterResidency = Literal["device", "host", "peer", "remote", "disk", "unavailable"]
OnPublish = Literal["keep", "switch"]
"""A running answer ends with its first version, or goes on with each new version of its adapter."""
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
NO_TOKEN = -1
"""Fills short rows of `prompt_logprob_token_ids`."""
MAX_REPORT_BYTES = 32 << 20
"""Experts or log probabilities of a prompt, in one message of at most twice the size."""
MAX_LOGIT_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 100.0  # quotients are finite in float32
UNFOLLOWABLE = "no token can follow"
"""Start of the error of an answer without a next token: by the request, not by the engine."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: a division of logits would overflow."""
BACKGROUND = 1 << 20
"""Least priority of background requests: they compute in steps without other requests."""

MAX_ADAPTER_NAME_CHARS = 256
COMPOSED = "composed:"
"""Start of names and paths of weighted sums of adapters."""


def name_problem(name: str) -> str | None:
    """Error text for a name unfit for an adapter (metrics join names by commas, logs by lines), or None."""
    if not name:
        return "is empty; give the name that requests will use as model"
    if len(name) > MAX_ADAPTER_NAME_CHARS or not name.isprintable() or "," in name:
        return f"must be at most {MAX_ADAPTER_NAME_CHARS} printable characters without commas"
    if name.startswith(COMPOSED):
        return f"starts with {COMPOSED!r}, as names of weighted sums do; choose another"
    return None


def is_base_name(name: str, bases: Collection[str]) -> bool:
    """True for a base model in a client's words: empty, or one of `bases`, alone or behind a slash."""
    return not name or name in bases or name.rpartition("/")[2] in bases


def version_name(name: str, version: int) -> str:
    """The adapter's name of a registry's version."""
    return f"{name}@v{version}"


def name_matches(adapter: str, patterns: Iterable[str]) -> bool:
    """True if a shell pattern matches the adapter, or the name before its `version_name`."""
    name, _, version = adapter.rpartition("@v")
    names = (adapter, name) if name and version.isdigit() else (adapter,)
    return any(fnmatchcase(one, pattern) for pattern in patterns for one in names)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str.__str__, (value,) if isinstance(value, str) else value))


def token_ids(value: Any) -> tuple[int, ...]:
    """A list, array or tensor of whole numbers as ints.  Raises TypeError."""
    found = tuple(value.tolist() if hasattr(value, "tolist") else value)
    if isinstance(value, (bytes, bytearray, Mapping)) or bool in map(type, found):
        raise TypeError
    return tuple(map(index, found))


class _Ids(tuple[int, ...]):
    """Token ids in form: a copy of the parameters reads thousands only once."""

    __slots__ = ()

    def __new__(cls, value: Any) -> _Ids:
        return value if type(value) is cls else super().__new__(cls, token_ids(value))


class _Rows(tuple[tuple[int, ...], ...]):
    __slots__ = ()

    def __new__(cls, value: Any) -> _Rows:
        return value if type(value) is cls else super().__new__(cls, map(token_ids, value))


def _biases(value: Any) -> dict[int, float]:
    return {index(token_id): bias.__float__() for token_id, bias in value.items()}


@dataclass(frozen=True)
class ThinkingLimit:
    """The longest reasoning of an answer: `num_tokens` after `opening`; the tokens of `closing` follow.

    opening: at the answer's start; (): the prompt ends in the reasoning.
    """

    num_tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            found = index(self.num_tokens), token_ids(self.opening), token_ids(self.closing)
        except TypeError as error:
            raise ValueError(f"{self!r} is not allowed; give a whole number and twice token ids") from error
        if found[0] < 0 or not found[2]:
            raise ValueError(f"{self!r} is not allowed; give num_tokens from 0 on and tokens of closing")
        for name, value in zip(("num_tokens", "opening", "closing"), found, strict=True):
            object.__setattr__(self, name, value)


_COUNTS = "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "prompt_logprob_start"
_NUMBERS = "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"
_BOOLS: dict[Any, Any] = {False: False, True: True}
_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stop": (_texts, "a string, or strings"),
    "stop_token_ids": (_Ids, "token ids"),
    "logprob_token_ids": (_Ids, "token ids"),
    "prompt_logprob_token_ids": (_Rows, "lists of token ids"),
    "logit_bias": (_biases, "a bias by token id"),
    "allowed_token_ids": (_Ids, "token ids"),
    "bad_words": (_texts, "a string, or strings"),
    "bad_word_ids": (_Rows, "lists of token ids"),
    "grammar": (str.__str__, "a grammar's text"),
    "processed_logprobs": ({**_BOOLS, "alone": "alone"}.__getitem__, "true, false or alone"),
    **dict.fromkeys(("ignore_eos", "hidden_state", "routed_experts"), (_BOOLS.__getitem__, "true or false")),
    **dict.fromkeys(_COUNTS, (index, "a whole number")),
    **dict.fromkeys(_NUMBERS, (methodcaller("__float__"), "a number")),
}
"""Fields of `SamplingParams` -> their form, made of other numbers or sequences, and its name."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choice of the next token, and stop conditions.

    temperature 0 is greedy.  top_k 0 considers all tokens.  min_p: least probability relative to the
    likeliest token's.  logprobs n: of the chosen token and the n likeliest, before temperature and
    truncation; -1: of the whole vocabulary.  processed_logprobs: also of the chosen token after edits,
    temperature and truncation; greedy: after edits; "alone": in place of the others, for all n.
    logprob_token_ids: these tokens in place of the n likeliest.  prompt_logprobs n: the same of prompt
    tokens.  prompt_logprob_token_ids: log probabilities of the row's tokens at each prompt token's place,
    from token prompt_logprob_start + 1 on; -1: of no token.  hidden_state: the last prompt token's state
    after the final norm.  routed_experts: chosen experts of all tokens but the last.  on_publish: at a
    new version of the adapter during the answer.  max_tokens None: up to the model's length limit.

    repetition_penalty divides positive logits of tokens in prompt or answer, and multiplies negative ones.
    Each token in the answer loses presence_penalty and, per occurrence, frequency_penalty.  logit_bias adds
    to logits of token ids.  Other tokens than allowed_token_ids, and the last token of bad_words, are never
    drawn.  bad_word_ids: bad_words as token ids.  grammar: of the answer, made by `engine.text.grammars`.
    thinking: limit of the reasoning.

    A list, array or tensor stands for its tuple, a string for a tuple of one, None for no entries, or the
    default value.
    Raises ValueError naming the parameter and its allowed range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    processed_logprobs: bool | Literal["alone"] = False
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprob_start: int = 0
    hidden_state: bool = False
    routed_experts: bool = False
    on_publish: OnPublish = "keep"
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    thinking: ThinkingLimit | None = None

    def __post_init__(self) -> None:
        for name, (made, rule) in _FORMS.items():
            value, default = getattr(self, name), getattr(SamplingParams, name)
            if value is not default and not (value is None and name == "max_tokens"):
                try:
                    object.__setattr__(self, name, default if value is None else made(value))
                except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
                    self._check(name, False, rule)
        is_limit = self.thinking is None or isinstance(self.thinking, ThinkingLimit)
        self._check("thinking", is_limit, "a ThinkingLimit")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, ">= 1")
        limit = math.inf if self.max_tokens is None else self.max_tokens
        self._check("min_tokens", 0 <= self.min_tokens <= limit, "between 0 and max_tokens")
        self._check("on_publish", self.on_publish in ("keep", "switch"), "keep or switch")
        self._check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        self._check("top_k", self.top_k >= 0, ">= 0 (0 considers all tokens)")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        self._check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        self._check("stop", all(self.stop), "non-empty strings")
        rule = f"between 0 and {MAX_LOGPROBS}, or -1 for the whole vocabulary"
        self._check("logprobs", self.logprobs is None or -1 <= self.logprobs <= MAX_LOGPROBS, rule)
        listed = self.logprob_token_ids
        if listed:
            self._check("logprob_token_ids", len(listed) <= MAX_LOGPROB_IDS, f"at most {MAX_LOGPROB_IDS} ids")
            self._check("logprob_token_ids", self.logprobs is not None, "empty without logprobs")
        has_logprobs = self.logprobs is not None or not self.processed_logprobs
        self._check("processed_logprobs", has_logprobs, "false without logprobs")
        num = self.prompt_logprobs
        self._check("prompt_logprobs", num is None or -1 <= num <= MAX_LOGPROBS, rule)
        width = max(map(len, self.prompt_logprob_token_ids), default=1)
        if not 1 <= width <= MAX_LOGPROB_IDS:
            what = f"prompt_logprob_token_ids has at most {width} ids in a row; allowed are 1"
            raise ValueError(f"{what} to {MAX_LOGPROB_IDS}")
        if self.edits_logits:
            self._check_edits()

    def _check_edits(self) -> None:
        for name in ("frequency_penalty", "presence_penalty"):
            self._check(name, -2.0 <= getattr(self, name) <= 2.0, "between -2 and 2")
        least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        in_range = least <= self.repetition_penalty <= most
        self._check("repetition_penalty", in_range, f"between {least:g} and {most:g}")
        if wrong := [bias for bias in (self.logit_bias or {}).values() if not abs(bias) <= MAX_LOGIT_BIAS]:
            limit = f"{MAX_LOGIT_BIAS:g}"
            raise ValueError(f"logit_bias has {wrong[0]!r}; a bias must be between -{limit} and {limit}")
        self._check("allowed_token_ids", self.allowed_token_ids != (), "at least one token id")
        self._check("bad_words", all(self.bad_words), "non-empty strings")
        self._check("bad_word_ids", all(self.bad_word_ids), "non-empty lists of token ids")

    def _check(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; {name} must be {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def edits_logits(self) -> bool:
        """True if logits depend on more than the model."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        tokens = self.bad_words or self.bad_word_ids or self.logit_bias or self.allowed_token_ids is not None
        is_bound = self.grammar is not None or self.thinking is not None
        return penalties != (0.0, 0.0, 1.0) or bool(tokens) or is_bound

    def edited_ids(self) -> list[tuple[str, Iterable[int]]]:
        """Token ids of the edits, by field."""
        return [
            ("thinking", self.thinking.closing if self.thinking else ()),
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", chain.from_iterable(self.bad_word_ids)),
        ]


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt for one adapter (None: the base model).

    Fields of a moved answer.  generated: tokens so far; the next is drawn at position len(generated) of the
    seed; limits count them.  adapter_version, adapter_content: required of the adapter; None: the current
    ones.  held: compute all known tokens but the last, report by an output without tokens, and wait for a
    resume. awaits_kv: held, without computation: KV arrives from the former instance; an output reports
    allocated pages.  prefill_only: held after the first token, until a move or a resume; an output without
    tokens reports the first of several steps.

    tenant, share: owner and weight for fairness (`policies.admission.fairness`).  priority: within the
    tenant; lower goes first; from BACKGROUND on after all tenants.  cache_salt: requests of the same salt
    share cached prompts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapter: str | None = None
    adapter_version: int | None = None
    adapter_content: str | None = None
    generated: tuple[int, ...] = ()
    held: bool = False
    awaits_kv: bool = False
    prefill_only: bool = False
    tenant: str = ""
    share: float = 1.0
    priority: int = 0
    cache_salt: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def known_tokens(self) -> int:
        """Tokens to compute before a new token: prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.generated)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of the chosen token, its position in the ranking (1 = likeliest), and the likeliest.

    top: (id, log probability) of the likeliest tokens.  likeliest: the same, packed as bytes beyond 128 ids.
    processed: see `SamplingParams`.
    """

    logprob: float
    position: int
    likeliest: tuple[tuple[int, float], ...] | bytes = ()
    processed: float | None = None

    @cached_property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens: (id, log probability)."""
        return _pairs(self.likeliest) if isinstance(self.likeliest, bytes) else self.likeliest


def _pairs(packed: bytes) -> tuple[tuple[int, float], ...]:
    num = len(packed) // 8
    numbers = struct.unpack(f"<{num}f{num}i", packed)
    return tuple(dict(zip(numbers[num:], numbers[:num], strict=True)).items())


def token_logprobs(num: int, content: Any) -> Iterator[TokenLogprobs]:
    """Reports of tokens, made one at a time.

    content: of each token log probabilities, its own and the num likeliest, fp32, then position and num ids,
    int32, little-endian.  A repeated id counts once.
    """
    for logprob, values, position, ids in struct.iter_unpack(f"<f{4 * num}si{4 * num}s", content):
        packed = values + ids
        yield TokenLogprobs(logprob, position, packed if num > MAX_LOGPROB_IDS else _pairs(packed))


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `prompt_logprobs`, `hidden_state` and `prompt_logprob_token_ids`.

    scores: of `token_logprobs`.  hidden: [H] fp32, little-endian.  id_logprobs: [rows, most ids of a row]
    fp32, little-endian; minus infinity for no token.  experts: L layers with experts, K experts of a
    token, and [tokens, L, K] int16, little-endian: of tokens without an earlier report.
    """

    scores: tuple[int, bytes] | None = None
    hidden: bytes | None = None
    id_logprobs: bytes | None = None
    experts: tuple[int, int, bytes] | None = None

    @property
    def logprobs(self) -> Iterator[TokenLogprobs] | None:
        """Of each prompt token but the first."""
        return None if self.scores is None else token_logprobs(*self.scores)


@dataclass(frozen=True, kw_only=True)
class RequestTiming:
    """A request's seconds inside the engine (docs/reference/metrics.md); TTFT is the sum without
    first_decode_s.

    queue_s: until admission, without both loads. adapter_load_s: wait for the adapter (LoRA cold start).
    kv_load_s: further wait for history KV (KV cold start).  prefill_s: until the first token.
    first_decode_s: first until second token, or 0.  adapter_wait_s: part of queue_s with room in the engine
    but no slot for this adapter or an earlier request's.  num_preemptions: losses of the KV pages.
    """

    queue_s: float
    adapter_load_s: float
    prefill_s: float
    first_decode_s: float
    kv_load_s: float = 0.0
    adapter_wait_s: float = 0.0
    num_preemptions: int = 0

    @property
    def decode_ttft_s(self) -> float:
        """Queueing + loads + first decode step, prefill excluded (InfiniLoRA, section 2.3)."""
        return self.queue_s + self.adapter_load_s + self.kv_load_s + self.first_decode_s


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of a request in one step.  The finish_reason and timing come with the last.

    adapter_version: of the request's adapter.  prompt: with the first token; with `routed_experts`, with
    each.  A struct for speed.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    adapter_version: int | None = None
    prompt: PromptReport | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """An adapter of the engine.

    residency: device, host, pool (another instance's host memory), LoRA Server or file; unavailable: the
    content is lost, or serving failed (problem: the reason). content_hash: of the packed bytes, "" if
    unknown. device_bytes: in whole pages, also if not resident.  idle_s: since a request last began or
    ended; None: no request yet.
    """

    name: str
    version: int
    lora_rank: int
    nbytes: int
    targets: tuple[str, ...]
    path: str | None
    residency: AdapterResidency
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    pinned: bool = False
    idle_s: float | None = None
    content_hash: str = ""
    device_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts about an engine for its front end.

    block_size: tokens of a KV page.  num_kv_blocks: most KV pages of its device.  devices: of its ranks, by
    torch's names.  tool_format: of the family's calls, "" = unknown.  sampling_defaults: fields of
    `SamplingParams` for requests without values.  expert_bytes: of a token's chosen experts.
    """

    name: str
    model_dir: str
    family: str
    dtype: str
    max_model_len: int
    vocab_size: int
    max_loras: int
    eos_token_ids: tuple[int, ...]
    block_size: int = 0
    num_kv_blocks: int = 0
    devices: tuple[str, ...] = ()
    tool_format: str = ""
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    expert_bytes: int = 0


STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step, as in vLLM: computed tokens of prompts, and generated tokens."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Gauges (now) and counters (since start) of an engine (docs/reference/prometheus.md).

    num_deferred: waiting requests without their adapter, or with a pause.  num_background: requests of
    batches in a queue, beside num_waiting.
    device_kv_invalid_bytes: history of adapters not on the device.  kv_query_tokens: looked up at each
    admission.  swapped: copied between the arenas.  kv_lost_bytes: evicted from the device without a host
    copy.  num_put_back: waiting requests that yielded their room to an older request. lora_server_ fields
    count the engine's first rank: fallback_rows: computed by the engine instead; host_rows: by the server's
    host workers; put_steps: with rows put by the device; redone_steps: recomputed for lack of answers.
    lora_rows_: rows x layers by source; a row counts twice if dense sites and experts differ.
    host_fallback_rows: computed by the engine instead of a host worker. pool_failed_sources: peers and
    directories. steps_merged: for the adapter's requests alone; steps_mixed: for other requests too.
    merges, unmerges: complete ones. merge_kept_bytes: original weights on the host. step_counts: steps of up
    to each of STEP_BUCKETS tokens, and of more; step_tokens: of all steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_background: int = 0
    kv_usage: float = 0.0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    resident_adapters: tuple[str, ...] = ()
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_load_bytes: int = 0
    adapter_hits: int = 0
    adapter_misses: int = 0
    adapters_preloaded: int = 0
    kv_query_tokens: int = 0
    kv_device_hit_tokens: int = 0
    kv_host_hit_tokens: int = 0
    swapped_in_bytes: int = 0
    swapped_out_bytes: int = 0
    kv_lost_bytes: int = 0
    num_put_back: int = 0
    device_bytes: int = 0
    device_kv_bytes: int = 0
    device_kv_invalid_bytes: int = 0
    device_adapter_bytes: int = 0
    host_bytes: int = 0
    host_kv_bytes: int = 0
    host_adapter_bytes: int = 0
    lora_rows_local: int = 0
    lora_rows_leased: int = 0
    lora_rows_host: int = 0
    host_fallback_rows: int = 0
    lora_server_requests: int = 0
    lora_server_fallback_rows: int = 0
    lora_server_host_rows: int = 0
    lora_server_put_steps: int = 0
    lora_server_redone_steps: int = 0
    pool_adapters: int = 0
    pool_bytes: int = 0
    pool_peer_fetches: int = 0
    pool_disk_fetches: int = 0
    pool_fetched_bytes: int = 0
    pool_failed_sources: int = 0
    steps_merged: int = 0
    steps_mixed: int = 0
    merges: int = 0
    unmerges: int = 0
    merge_s: float = 0.0
    unmerge_s: float = 0.0
    merge_kept_bytes: int = 0
    step_counts: tuple[int, ...] = (0,) * (len(STEP_BUCKETS) + 1)
    step_tokens: int = 0

    @property
    def steps_unmerged(self) -> int:
        """Steps on the base's weights."""
        return self.num_steps - self.steps_merged - self.steps_mixed


@dataclass(frozen=True, kw_only=True)
class InstanceStats:
    """An instance behind a front end.  Counters are since the front end's start.

    name: number or dial-in name.  silent: without requests for lack of progress. drained: without requests
    while other instances serve.  outstanding_tokens: still needed at most. num_resent: unfinished requests
    continued by another instance.
    """

    index: int
    name: str
    live: bool
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    outstanding_tokens: int = 0
    num_restarts: int = 0
    num_resent: int = 0
    silent: bool = False
    drained: bool = False
    pool_adapters: int = 0
    pool_bytes: int = 0
    device_bytes: int = 0
    devices: tuple[str, ...] = ()


PAUSE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class MoveStats:
    """Requests of one front end moved between instances, since the start.

    num_failed: moves whose request stayed, or had ended. pause_counts: pauses up to each of PAUSE_BUCKETS_S
    and above the last; pause_s: sum in seconds.
    """

    num_moved: dict[str, int] = field(default_factory=dict)
    num_failed: int = 0
    pause_counts: tuple[int, ...] = (0,) * (len(PAUSE_BUCKETS_S) + 1)
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """Choices of routing=rank_aware in one front end since its start.

    num_choices: by the cost at the chosen instance, "finite" or "infinite" (no instance keeps slo_tpot_s).
    mean_output_tokens: expected tokens of an answer.
    """

    num_choices: Mapping[str, int]
    mean_output_tokens: float

    @property
    def infinite_share(self) -> float:
        """Share of the choices without an instance that keeps slo_tpot_s, 0 to 1."""
        return self.num_choices["infinite"] / max(1, sum(self.num_choices.values()))


@dataclass(frozen=True, kw_only=True)
class FleetStats(EngineStats):
    """Several engines together: requests and counters as sums, names as unions, kv_usage as the mean.

    routing: None with a router other than rank_aware.
    """

    instances: tuple[InstanceStats, ...]
    moves: MoveStats = field(default_factory=MoveStats)
    routing: RoutingStats | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A packed adapter without its bytes; plain picklable data.

    dtype: torch's name without "torch.".  num_entries: rows of each layer's table.  layer_elements: elements
    of each layer's data.  The rest as in `PackedAdapter`.
    """

    name: str
    content_hash: str
    max_lora_rank: int
    nbytes: int
    targets: tuple[str, ...]
    dtype: str
    num_entries: int
    layer_elements: tuple[int, ...]
    invocation: tuple[int, ...] = ()
    has_columns: bool = False
    shard_elements: tuple[int, ...] = ()
    of_ranks: tuple[int, int] = (1, 1)


def token_work(request: GenerateRequest, max_model_len: int) -> int:
    """Rows that the request may need: prompt and longest allowed answer."""
    num_prompt = len(request.prompt_token_ids)
    room = max(0, max_model_len - num_prompt)
    limit = request.sampling.max_tokens
    return num_prompt + (room if limit is None else min(limit, room))


def add_run(runs: list[tuple[int, int]], version: int, num_tokens: int) -> None:
    """Add an answer's tokens to its runs of (version, number of tokens)."""
    if runs and runs[-1][0] == version:
        num_tokens += runs.pop()[1]
    if num_tokens:
        runs.append((version, num_tokens))
