"""vLLM's options as `moe-lora serve` takes them: the one table of options, help, docs and test.

An option that would change answers, access or the served models is refused, with a way out, unless its value
asks for nothing new.  An option that only tunes speed or logs has no effect; the log says so once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Takes = Literal["flag", "value", "values"]
ANY = "*"
MODEL = "MODEL_DIR"
"""Stands for the path of the model in `VllmOption.words`."""


class VllmOption(NamedTuple):
    """One option of vLLM.

    names: the long name, then short ones.  takes: "flag" is on, off as --no-NAME.  words: value → our words,
    `{}` for the value, "" for none; `ANY`: every other value.  A value that is missing in words is refused.
    text: the reason why there is no effect, or the way out of a refusal.  convert: see
    `cli.vllm_words.CONVERTERS`.  example: a value that `ANY` takes.
    """

    names: tuple[str, ...]
    takes: Takes
    words: Mapping[str, str]
    text: str
    convert: str = ""
    example: str = "1"
    own: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_unused(self) -> bool:
        """Whether every value goes without an effect."""
        return not self.own and bool(self.words) and not any(self.words.values()) and not self.is_neutral_only

    @property
    def is_neutral_only(self) -> bool:
        """Whether some values are accepted because they ask for nothing, and others are refused."""
        return ANY not in self.words and (self.takes != "flag" or len(self.words) < 2)

    def here(self) -> str:
        """The option's effect in `moe-lora serve`, for help and docs."""
        if self.own and not self.text:
            return "as in vLLM"
        if self.own:
            return f"as in vLLM; {self.text}"
        if self.is_unused:
            return f"no effect: {self.text}"
        if self.takes == "flag" and self.is_neutral_only:
            return f"refused: {self.text}" if "false" in self.words else f"always on: {self.text}"
        ours = "; ".join(
            f"`{shown}`" if value in (ANY, "true") else f"{self._given(value)}: `{shown}`"
            for value, words in self.words.items()
            if words and (shown := _shown(words))
        )
        if ours:
            return f"means {ours}" + (f"; {self.text}" if self.text else "")
        neutral = " or ".join(f"`{self._given(value)}`" for value in self.words)
        return f"only {neutral}; else refused: {self.text}" if neutral else f"refused: {self.text}"

    def _given(self, value: str) -> str:
        if self.takes != "flag":
            return value
        return self.name if value == "true" else f"--no-{self.name[2:]}"


def _shown(words: str) -> str:
    """Our words as help and docs show them."""
    return MODEL if words == "{}" else words.replace("{}", "VALUE").replace("{tensor}", "RANKS")


def _same(name: str, text: str = "", *, convert: str = "", example: str = "1", **words: str) -> VllmOption:
    return VllmOption((name,), "value", words or {ANY: f"{name} {{}}"}, text, convert, example, own=True)


def _alias(
    names: str, ours: str, text: str = "", *, convert: str = "", example: str = "1", takes: Takes = "value"
) -> VllmOption:
    return VllmOption(tuple(names.split()), takes, {ANY: ours}, text, convert, example)


def _flag(names: str, on: str | None, off: str | None, text: str = "") -> VllmOption:
    """on, off: our words; None: refused."""
    words = {key: words for key, words in (("true", on), ("false", off)) if words is not None}
    return VllmOption(tuple(names.split()), "flag", words, text)


def _unused(names: str, why: str, takes: Takes = "value") -> VllmOption:
    """An option that has no effect here."""
    words = {"true": "", "false": ""} if takes == "flag" else {ANY: ""}
    return VllmOption(tuple(names.split()), takes, words, why)


def _only(names: str, values: tuple[str, ...], way_out: str) -> VllmOption:
    """An option of which these values ask for nothing new."""
    return VllmOption(tuple(names.split()), "value", dict.fromkeys(values, ""), way_out)


def _off(names: str, way_out: str) -> VllmOption:
    """A flag that must stay off."""
    return _flag(names, None, "", way_out)


def _refused(names: str, way_out: str) -> VllmOption:
    return VllmOption(tuple(names.split()), "value", {}, way_out)


_TENSORS = "save the model as safetensors files and give their folder"
_CONFIG = "config.json of MODEL_DIR decides; change the file there"
_ONE_HOST = "instances of several hosts join through a file, see docs/guides/cluster.md"
_TEXT_ONLY = "models here take text alone"
_NO_DRAFT = "no draft model runs here; answers are the same"
_SCHEDULE = "the scheduler here has no such choice; --max-num-batched-tokens bounds a step"
_COMPILED = "the step's graphs are chosen here; --eager turns compilation off"
_LOGS = "requests are not logged; /metrics counts requests"
_LOGS_WITH = "requests are not logged; log them at a proxy, or count them by /metrics"
_TRACES = "no traces are sent; /metrics has the times of requests"
_TOOLS = "leave it out; answers are plain text, and requests with tools are refused"
_CODE = "no code of others runs in the server; leave it out"
_CORS = "every method and header is allowed to an origin of --cors-origin; give '[\"*\"]' or leave it out"
_PEERS = "leave it out; processes of an instance compute prompts and answers alike"
_FIXED_ADAPTERS = "leave it out; a request names its adapter as model"

MODELS = (
    _alias("--model", "{}", "the folder may also come first, without a name", example=MODEL),
    VllmOption(
        ("--served-model-name",),
        "values",
        {ANY: "--served-model-name {}"},
        "answers and metrics show the first name",
        own=True,
    ),
    _only("--tokenizer", (MODEL,), "the tokenizer of MODEL_DIR is read; copy the tokenizer's files there"),
    _only("--tokenizer-mode", ("auto", "hf"), "tokenizers are read in the format of Hugging Face alone"),
    _off("--skip-tokenizer-init", "a MODEL_DIR without tokenizer files takes token ids"),
    _unused("--trust-remote-code", "code of a checkpoint never runs", "flag"),
    _refused("--revision", "MODEL_DIR is a folder; download the revision and give its folder"),
    _refused("--code-revision", "code of a checkpoint never runs; leave it out"),
    _refused("--tokenizer-revision", "download the revision and copy its tokenizer files to MODEL_DIR"),
    _unused("--download-dir", "nothing is downloaded"),
    _unused("--hf-token", "nothing is downloaded"),
    _refused("--hf-config-path", _CONFIG),
    _only("--hf-overrides", ("{}",), _CONFIG),
    _only("--rope-scaling", ("{}",), _CONFIG),
    _refused("--rope-theta", _CONFIG),
    _off("--disable-sliding-window", "give --max-model-len of at most the window, or leave it out"),
    _same(
        "--dtype",
        "fp16 is not computed; choose bfloat16 or float32",
        **{
            "auto": "--dtype auto",
            "bfloat16": "--dtype bfloat16",
            "float32": "--dtype float32",
            "float": "--dtype float32",
        },
    ),
    _same(
        "--load-format",
        _TENSORS,
        **{"auto": "", "safetensors": "--load-format safetensors", "dummy": "--load-format dummy"},
    ),
    _only("--config-format", ("auto", "hf"), _CONFIG),
    _only("--model-impl", ("auto", "vllm"), "models run on the layers of this package; choose auto"),
    _only("--task", ("auto", "generate"), "this server generates text; choose generate"),
    _only("--runner", ("auto", "generate"), "this server generates text; choose generate"),
    _only("--convert", ("auto", "none"), "this server generates text; choose none"),
    _only(
        "--quantization -q",
        ("None", "none", "mxfp4", "compressed-tensors"),
        "config.json says how a checkpoint is quantised, leave the option out then; --quantize int8, int4 or "
        "fp8 quantises other weights as they are loaded",
    ),
    _only("--model-loader-extra-config", ("{}",), _TENSORS),
    _unused("--ignore-patterns", "nothing is downloaded"),
    _unused("--use-tqdm-on-load", "no progress bar is shown", "flag"),
    _unused("--safetensors-load-strategy", "files are mapped and read once"),
    _unused("--max-parallel-loading-workers", "each process reads its own part"),
    _same("--device", example="cpu"),
    _same("--max-model-len", "`k` means 1,000 and `K` 1,024", convert="count"),
    _alias("--seed", "--set engine.seed={}"),
    _only("--max-logprobs", ("20",), "requests may ask for 20 at most; leave it out"),
    _only(
        "--logprobs-mode", ("raw_logprobs",), "log probabilities are those before temperature; leave it out"
    ),
    _only("--generation-config", ("vllm",), "sampling defaults are OpenAI's; send them with each request"),
    _only("--override-generation-config", ("{}",), "send sampling parameters with each request"),
    _off("--enable-sleep-mode", "stop the server to free its device"),
    _unused("--limit-mm-per-prompt", _TEXT_ONLY),
    _unused("--mm-processor-kwargs", _TEXT_ONLY),
    _unused("--mm-processor-cache-gb", _TEXT_ONLY),
    _unused("--mm-encoder-tp-mode", _TEXT_ONLY),
    _unused("--skip-mm-profiling", _TEXT_ONLY, "flag"),
    _unused("--language-model-only", _TEXT_ONLY, "flag"),
    _unused("--disable-mm-preprocessor-cache", _TEXT_ONLY, "flag"),
    _unused("--allowed-local-media-path", _TEXT_ONLY),
    _unused("--allowed-media-domains", _TEXT_ONLY, "values"),
    _unused("--speculative-config", _NO_DRAFT),
    _unused("--speculative-model", _NO_DRAFT),
    _unused("--num-speculative-tokens", _NO_DRAFT),
    _unused("--guided-decoding-backend", "no request may ask for structured output"),
    _unused("--structured-outputs-config", "no request may ask for structured output"),
    _refused("--logits-processors", _CODE),
    _refused("--logits-processor-pattern", _CODE),
)
"""What is served, and how weights are read."""
PARALLEL = (
    _alias("--tensor-parallel-size -tp", "--tensor-parallel {}", example="2"),
    _flag(
        "--enable-expert-parallel",
        "--expert-parallel {tensor}",
        "",
        "the ranks of one instance share the experts; every instance holds all experts",
    ),
    _alias("--data-parallel-size -dp", "--instances {}", _ONE_HOST, example="2"),
    _alias("--data-parallel-size-local -dpl", "--instances {}", _ONE_HOST, example="2"),
    _only("--data-parallel-start-rank -dpr", ("0",), _ONE_HOST),
    _only("--data-parallel-rank -dpn", ("0",), _ONE_HOST),
    _unused("--data-parallel-address -dpa", "instances of one host need no address"),
    _unused("--data-parallel-rpc-port -dpp", "instances of one host need no port"),
    _only("--data-parallel-backend -dpb", ("mp",), _ONE_HOST),
    _off("--data-parallel-hybrid-lb -dph", _ONE_HOST),
    _off("--data-parallel-external-lb -dpe", _ONE_HOST),
    _off("--headless", _ONE_HOST),
    _only("--nnodes -n", ("1",), _ONE_HOST),
    _only("--node-rank -r", ("0",), _ONE_HOST),
    _only(
        "--pipeline-parallel-size -pp",
        ("1",),
        "layers are not divided over processes; use --tensor-parallel or --expert-parallel",
    ),
    _only("--decode-context-parallel-size -dcp", ("1",), "a context is not divided; use --tensor-parallel"),
    _only("--distributed-executor-backend", ("mp", "uni"), _ONE_HOST),
    _alias("--api-server-count -asc", "--front-ends {}", example="2"),
    _unused("--disable-frontend-multiprocessing", "each front end is a process", "flag"),
    _unused("--disable-custom-all-reduce", "the ranks of an instance choose how they exchange", "flag"),
    _unused("--enable-eplb", "experts stay where they are; answers are the same", "flag"),
    _unused("--eplb-config", "experts stay where they are; answers are the same"),
    _unused("--enable-dbo", "a step computes one batch; answers are the same", "flag"),
    _unused("--all2all-backend", "the ranks of an instance choose how they exchange"),
    _unused("--ray-workers-use-nsight", "no Ray is used", "flag"),
    _refused("--worker-cls", _CODE),
    _refused("--worker-extension-cls", _CODE),
)
"""Processes and devices."""
MEMORY = (
    _alias(
        "--gpu-memory-utilization",
        "--set engine.memory_utilization={}",
        "weights, KV and adapters of a process; a step's own memory comes on top",
        example="0.9",
    ),
    _alias("--kv-cache-memory-bytes", "--kv-cache-gb {}", convert="bytes_to_gb", example="2e9"),
    _alias("--kv-offloading-size", "--host-arena-mb {}", convert="gib_to_mb"),
    _only("--kv-offloading-backend", ("native",), "KV that leaves the device goes to --host-arena-mb"),
    _unused("--swap-space", "--host-arena-mb says how much KV the host keeps"),
    _only("--cpu-offload-gb", ("0", "0.0"), "weights stay on the device; --quantize makes them smaller"),
    _refused("--num-gpu-blocks-override", "give --kv-cache-gb"),
    _only(
        "--kv-cache-dtype",
        ("auto", "bfloat16"),
        "KV has the dtype of the model; leave it out, and give --kv-cache-gb for more room",
    ),
    _unused("--calculate-kv-scales", "KV is not quantised", "flag"),
    _same("--block-size"),
    _flag("--enable-prefix-caching", "", "--no-prefix-caching", "on by default"),
    _unused("--prefix-caching-hash-algo", "prefixes are compared token by token"),
    _unused("--disable-hybrid-kv-cache-manager", "one cache has KV of all layers", "flag"),
    _only("--kv-transfer-config", ("", "{}"), _PEERS),
    _only(
        "--kv-events-config",
        ("", "{}"),
        "no events of the cache are published; route by vllm:lora_requests_info",
    ),
)
"""Device and host memory."""
SCHEDULING = (
    _same("--max-num-seqs"),
    _same("--max-num-batched-tokens", "`k` means 1,000 and `K` 1,024", convert="count"),
    _unused(
        "--enable-chunked-prefill",
        "a prompt above --max-num-batched-tokens is always computed in chunks; give more to compute it whole",
        "flag",
    ),
    VllmOption(
        ("--async-scheduling",),
        "flag",
        {"true": "--async-scheduling on", "false": "--async-scheduling off"},
        "a word may follow: auto, on or off",
        own=True,
    ),
    _only("--scheduling-policy", ("fcfs", "priority"), "choose fcfs or priority"),
    _unused("--num-scheduler-steps", _SCHEDULE),
    _unused("--multi-step-stream-outputs", _SCHEDULE, "flag"),
    _unused("--scheduler-delay-factor", _SCHEDULE),
    _unused("--max-num-partial-prefills", _SCHEDULE),
    _unused("--max-long-partial-prefills", _SCHEDULE),
    _unused("--long-prefill-token-threshold", _SCHEDULE),
    _unused("--num-lookahead-slots", _SCHEDULE),
    _unused("--preemption-mode", "what leaves the device is chosen by --cache-policy"),
    _unused("--stream-interval", "each step is a chunk"),
    _refused("--scheduler-cls", _CODE),
    _flag("--enforce-eager", "--eager", ""),
    _unused("--compilation-config -O -cc", _COMPILED),
    _unused("--optimization-level", _COMPILED),
    _unused("--performance-mode", _COMPILED),
    _unused("--max-seq-len-to-capture", _COMPILED),
    _unused("--cuda-graph-sizes", _COMPILED, "values"),
    _unused("--cudagraph-capture-sizes", _COMPILED, "values"),
    _unused("--max-cudagraph-capture-size", _COMPILED),
    _unused("--disable-cascade-attn", "kernels are chosen here", "flag"),
    _unused("--attention-backend", "kernels are chosen here"),
    _unused("--moe-backend", "kernels are chosen here"),
    _unused("--disable-async-output-proc", "answers are made in the front end", "flag"),
    _unused("--use-v2-block-manager", "there is one cache", "flag"),
    _unused("--tokenizer-pool-size", "front ends tokenize; --front-ends says how many"),
)
"""Which requests a step computes, and how."""
ADAPTERS = (
    _flag(
        "--enable-lora",
        "",
        None,
        "adapters are always served; without any the base model answers alone, and --api-key keeps others "
        "from loading one",
    ),
    _same("--max-loras"),
    _same("--max-lora-rank", "no limit by default; an adapter above it is refused when its file is read"),
    _unused(
        "--max-cpu-loras", "the server keeps every adapter that was loaded; --host-arena-mb bounds memory"
    ),
    VllmOption(
        ("--lora-modules",),
        "values",
        {ANY: "--lora-modules {}"},
        'also as JSON, {"name": ..., "path": ..., "base_model_name": ...}',
        example="",
        own=True,
    ),
    _only("--lora-dtype", ("auto",), "adapters have the dtype of the model; give --dtype"),
    _unused("--fully-sharded-loras", "--tensor-parallel divides adapters as it divides weights", "flag"),
    _unused("--specialize-active-lora", "kernels take any number of adapters", "flag"),
    _unused("--lora-extra-vocab-size", "an adapter that adds tokens is refused when its file is read"),
    _off("--enable-lora-bias", "an adapter with biases is refused; train it with lora_bias=false"),
    _refused("--long-lora-scaling-factors", "leave it out; adapters with a longer context are not served"),
    _refused("--lora-target-modules", "leave it out; an adapter is served with all its modules"),
    _only("--default-mm-loras", ("{}",), _FIXED_ADAPTERS),
    _off("--enable-prompt-adapter", "prompt adapters are not served; train a LoRA adapter"),
    _refused("--qlora-adapter-name-or-path", "give the adapter by --lora-modules"),
)
"""LoRA."""
HTTP = (
    _same("--host", "127.0.0.1 by default, in vLLM all addresses"),
    _same("--port"),
    VllmOption(
        ("--api-key",),
        "values",
        {ANY: "--api-key {}"},
        "or VLLM_API_KEY; the key is an administrator's",
        example="secret",
        own=True,
    ),
    _alias("--ssl-certfile", "--tls-cert {}"),
    _alias("--ssl-keyfile", "--tls-key {}"),
    _only("--ssl-cert-reqs", ("0",), "certificates of clients are not checked; let a proxy check them"),
    _refused("--ssl-ca-certs", "certificates of clients are not checked; let a proxy check them"),
    _refused("--ssl-ciphers", "the system's OpenSSL decides; let a proxy choose"),
    _unused(
        "--enable-ssl-refresh",
        "restart the server after a certificate has changed, or with --config send SIGHUP",
        "flag",
    ),
    _alias("--allowed-origins", "--cors-origin {}", convert="origins", example='["*"]'),
    _only("--allowed-methods", ('["*"]',), _CORS),
    _only("--allowed-headers", ('["*"]',), _CORS),
    _off("--allow-credentials", "send keys in the header Authorization; leave it out"),
    _only("--root-path", ("", "/"), "let the proxy strip the prefix before it passes a request on"),
    _refused("--uds", "give --host and --port; --admin-address may be a socket"),
    _refused("--middleware", _CODE),
    _flag("--disable-fastapi-docs", "--set front_end.docs_page=false", ""),
    _unused("--enable-offline-docs", "the page at /docs loads nothing from elsewhere", "flag"),
    _alias("--shutdown-timeout", "--drain-s {}"),
    _unused("--uvicorn-log-level", _LOGS),
    _unused("--disable-uvicorn-access-log", _LOGS, "flag"),
    _unused("--disable-access-log-for-endpoints", _LOGS),
    _unused("--disable-log-requests", _LOGS, "flag"),
    _unused("--enable-log-requests", _LOGS_WITH, "flag"),
    _unused("--enable-log-outputs", _LOGS_WITH, "flag"),
    _unused("--enable-log-deltas", _LOGS_WITH, "flag"),
    _unused("--max-log-len", _LOGS),
    _unused("--log-config-file", "--log-level says how much is logged"),
    _unused("--log-error-stack", "an error of the server is logged with its stack", "flag"),
    _unused("--disable-log-stats", _LOGS, "flag"),
    _unused("--enable-server-load-tracking", "/metrics has the load", "flag"),
    _unused("--otlp-traces-endpoint", _TRACES),
    _unused("--collect-detailed-traces", _TRACES),
    _unused("--show-hidden-metrics-for-version", "every metric is shown"),
    _unused("--h11-max-incomplete-event-size", "--max-header-bytes bounds the head of a request"),
    _unused("--h11-max-header-count", "a request may have 128 headers"),
    _unused("--enable-request-id-headers", "every answer has X-Request-Id", "flag"),
    _unused("--enable-prompt-tokens-details", "usage always has prompt_tokens_details", "flag"),
    _off("--enable-force-include-usage", "send stream_options.include_usage with each request"),
    _off("--enable-per-request-metrics", "usage.timing has the times of a request"),
    _off("--enable-tokenizer-info-endpoint", "leave it out; the tokenizer's files tell the same"),
    _off("--return-tokens-as-token-ids", "send return_token_ids with each request"),
    _off("--tokens-only", "leave it out; a model without tokenizer files takes token ids"),
    _off("--grpc", "leave it out; the server speaks HTTP"),
    _off("--enable-auto-tool-choice", _TOOLS),
    _refused("--tool-call-parser", _TOOLS),
    _refused("--tool-parser-plugin", _TOOLS),
    _refused("--tool-server", _TOOLS),
    _off("--exclude-tools-when-tool-choice-none", _TOOLS),
    _refused("--reasoning-parser", "leave it out; an answer's text is given whole"),
    _refused("--chat-template", "copy the template to MODEL_DIR as chat_template.jinja"),
    _only("--chat-template-content-format", ("auto",), "the template's own form is used; leave it out"),
    _off("--trust-request-chat-template", "copy the template to MODEL_DIR as chat_template.jinja"),
    _only(
        "--default-chat-template-kwargs", ("{}",), "send chat_template_kwargs with each request; leave it out"
    ),
    _only("--response-role", ("assistant",), "answers have the role assistant; leave it out"),
    _only("--additional-config", ("{}",), "leave it out; it is for other platforms"),
)
"""The HTTP server."""
VLLM_OPTIONS: dict[str, tuple[VllmOption, ...]] = {
    "Model": MODELS,
    "Processes and devices": PARALLEL,
    "Memory": MEMORY,
    "Scheduling": SCHEDULING,
    "Adapters": ADAPTERS,
    "HTTP": HTTP,
}
"""By the headings of --help-vllm."""


def by_name() -> dict[str, VllmOption]:
    """The options by each of their names."""
    return {name: one for group in VLLM_OPTIONS.values() for one in group for name in one.names}
