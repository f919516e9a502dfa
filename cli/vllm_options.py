# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's options."""

from __future__ import annotations

from .vllm_option import (
    ANY,
    MODEL,
    VllmOption,
    alias,
    flag,
    off,
    only,
    refused,
    same,
    setting,
    switch,
    unused,
)

_TENSORS = "save the model as safetensors files and give their folder"
_CONFIG = "config.json of MODEL_DIR decides; change the file there"
_ONE_HOST = "instances of several hosts join through a file, see docs/guides/cluster.md"
_TASKS = "the server generates text and embeds; omit the option"
_TEXT_ONLY = "models here take text alone"
_NO_DRAFT = "no draft model runs here; answers are the same"
_SCHEDULE = "the scheduler here has no such choice; --max-num-batched-tokens bounds a step"
_COMPILED = "the step's graphs are chosen here; --eager turns compilation off"
_LOGS = "requests are not logged; /metrics counts requests"
_LOGS_WITH = "requests are not logged; log them at a proxy, or count them by /metrics"
_TRACES = "no traces are sent; /metrics has the times of requests"
_TOOLS = "omit the option; formats of calls are built in, and the client runs the tools"
_WITH_PARSER = "calls are parsed by default; with --config give --tool-call-parser too"
_TOOL_PARSERS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3"), ""),
    **{"openai": "harmony", "glm45": "glm4", "glm47": "glm4", "deepseek_v31": "deepseek_v3"},
    **{"kimi_k2": "kimi", "qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json"},
    **{"granite": "", "granite4": "hermes", "ernie45": "hermes", "minimax_m2": "", "gemma4": ""},
    **dict.fromkeys(("auto", "none", "harmony", "glm4", "kimi"), ""),
}
"""vLLM's name -> ours; "": the same."""
_REASONING_PARSERS = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "mistral", "seed_oss"), ""),
    **{"gemma4": "", "minimax_m2": "deepseek_r1"},
    **{"openai_gptoss": "harmony", "glm45": "glm4", "kimi_k2": "kimi", "deepseek_v31": "deepseek_v3"},
    **dict.fromkeys(("auto", "none", "harmony", "glm4", "kimi"), ""),
}
_CODE = "no code of others runs in the server; omit the option"
_CORS = "every method and header is allowed to front_end.cors_origins; give '[\"*\"]' or omit the option"
_PEERS = "omit the option; processes of an instance compute prompts and answers alike"
_FIXED_ADAPTERS = "omit the option; a request names its adapter as model"

MODELS = (
    alias("--model", "{}", "the folder may also come first, without a name", example=MODEL),
    same("--served-model-name", "answers and metrics show the first name", takes="values"),
    only("--tokenizer", (MODEL,), "the tokenizer of MODEL_DIR is read; copy the tokenizer's files there"),
    only("--tokenizer-mode", ("auto", "hf"), "tokenizers are read in the format of Hugging Face alone"),
    switch("--skip-tokenizer-init", "front_end.tokens_only"),
    unused("--trust-remote-code", "code of a checkpoint never runs", "flag"),
    refused("--revision", "MODEL_DIR is a folder; download the revision and give its folder"),
    refused("--code-revision", "code of a checkpoint never runs; omit the option"),
    refused("--tokenizer-revision", "download the revision and copy its tokenizer files to MODEL_DIR"),
    unused("--download-dir", "nothing is downloaded"),
    unused("--hf-token", "nothing is downloaded"),
    refused("--hf-config-path", _CONFIG),
    only("--hf-overrides", ("{}",), _CONFIG),
    only("--rope-scaling", ("{}",), _CONFIG),
    refused("--rope-theta", _CONFIG),
    off("--disable-sliding-window", "give --max-model-len of at most the window, or omit the option"),
    same(
        "--dtype",
        "fp16 is not computed; choose bfloat16 or float32",
        **{name: f"--dtype {name}" for name in ("auto", "bfloat16", "float32")},
        float="--dtype float32",
    ),
    same(
        "--load-format",
        _TENSORS,
        **dict.fromkeys(("auto", "safetensors"), "--set engine.load_format=safetensors"),
        dummy="--set engine.load_format=dummy",
    ),
    only("--config-format", ("auto", "hf"), _CONFIG),
    only("--model-impl", ("auto", "vllm"), "models run on the layers of this package; choose auto"),
    only("--task", ("auto", "generate", "embed", "embedding"), _TASKS),
    only("--runner", ("auto", "generate", "pooling"), _TASKS),
    only("--convert", ("auto", "none", "embed"), _TASKS),
    only(
        "--quantization -q",
        ("None", "none", "mxfp4", "compressed-tensors"),
        "config.json says how a checkpoint is quantised, omit the option then; --quantize int8, int4 or "
        "fp8 quantises other weights as they are loaded",
    ),
    only("--model-loader-extra-config", ("{}",), _TENSORS),
    unused("--ignore-patterns", "nothing is downloaded"),
    unused("--use-tqdm-on-load", "no progress bar is shown", "flag"),
    unused("--safetensors-load-strategy", "files are mapped and read once"),
    unused("--max-parallel-loading-workers", "each process reads its own part"),
    same("--device", example="cpu"),
    same(
        "--max-model-len",
        "`k` means 1,000 and `K` 1,024; `auto` and -1 mean the model's length",
        convert="count",
        **dict.fromkeys(("auto", "-1"), "--set engine.max_model_len=null"),
        **{ANY: "--max-model-len {}"},
    ),
    alias("--seed", "--set engine.seed={}"),
    only("--max-logprobs", ("20",), "requests may ask for 20 at most; omit the option"),
    only(
        "--logprobs-mode",
        ("raw_logprobs",),
        "log probabilities are those before temperature; omit the option",
    ),
    same(
        "--generation-config",
        "generation_config.json of MODEL_DIR is read; copy another file there",
        auto="--set engine.generation_config=auto",
        **dict.fromkeys(("vllm", "none"), "--set engine.generation_config=none"),
    ),
    only("--override-generation-config", ("{}",), "send sampling parameters with each request"),
    unused("--enable-sleep-mode", "on a CPU /sleep works without the option; a GPU's memory stays", "flag"),
    unused("--limit-mm-per-prompt", _TEXT_ONLY),
    unused("--mm-processor-kwargs", _TEXT_ONLY),
    unused("--mm-processor-cache-gb", _TEXT_ONLY),
    unused("--mm-encoder-tp-mode", _TEXT_ONLY),
    unused("--skip-mm-profiling", _TEXT_ONLY, "flag"),
    unused("--language-model-only", _TEXT_ONLY, "flag"),
    unused("--disable-mm-preprocessor-cache", _TEXT_ONLY, "flag"),
    unused("--allowed-local-media-path", _TEXT_ONLY),
    unused("--allowed-media-domains", _TEXT_ONLY, "values"),
    unused("--speculative-config", _NO_DRAFT),
    unused("--speculative-model", _NO_DRAFT),
    unused("--num-speculative-tokens", _NO_DRAFT),
    unused("--guided-decoding-backend", "llguidance compiles all grammars"),
    unused("--structured-outputs-config", "llguidance compiles all grammars"),
    refused("--logits-processors", _CODE),
    refused("--logits-processor-pattern", _CODE),
)
"""The model, its weights and its tokenizer."""
PARALLEL = (
    alias("--tensor-parallel-size -tp", "--tensor-parallel {}", example="2"),
    flag(
        "--enable-expert-parallel",
        "--expert-parallel {tensor}",
        "--expert-parallel 1",
        "the ranks of one instance share the experts; every instance holds all experts; with --config give "
        "--tensor-parallel-size too",
    ),
    alias("--data-parallel-size -dp", "--instances {}", _ONE_HOST, example="2"),
    alias("--data-parallel-size-local -dpl", "--instances {}", _ONE_HOST, example="2"),
    only("--data-parallel-start-rank -dpr", ("0",), _ONE_HOST),
    only("--data-parallel-rank -dpn", ("0",), _ONE_HOST),
    unused("--data-parallel-address -dpa", "instances of one host need no address"),
    unused("--data-parallel-rpc-port -dpp", "instances of one host need no port"),
    only("--data-parallel-backend -dpb", ("mp",), _ONE_HOST),
    off("--data-parallel-hybrid-lb -dph", _ONE_HOST),
    off("--data-parallel-external-lb -dpe", _ONE_HOST),
    off("--headless", _ONE_HOST),
    only("--nnodes -n", ("1",), _ONE_HOST),
    only("--node-rank -r", ("0",), _ONE_HOST),
    only(
        "--pipeline-parallel-size -pp",
        ("1",),
        "layers are not divided over processes; use --tensor-parallel or --expert-parallel",
    ),
    only("--decode-context-parallel-size -dcp", ("1",), "a context is not divided; use --tensor-parallel"),
    only("--distributed-executor-backend", ("mp", "uni"), _ONE_HOST),
    alias("--api-server-count -asc", "--front-ends {}", example="2"),
    unused("--disable-frontend-multiprocessing", "each front end is a process", "flag"),
    unused("--disable-custom-all-reduce", "the ranks of an instance choose how they exchange", "flag"),
    unused("--enable-eplb", "experts stay where they are; answers are the same", "flag"),
    unused("--eplb-config", "experts stay where they are; answers are the same"),
    unused("--enable-dbo", "a step computes one batch; answers are the same", "flag"),
    unused("--all2all-backend", "the ranks of an instance choose how they exchange"),
    unused("--ray-workers-use-nsight", "no Ray is used", "flag"),
    refused("--worker-cls", _CODE),
    refused("--worker-extension-cls", _CODE),
)
"""Processes and devices."""
MEMORY = (
    alias(
        "--gpu-memory-utilization",
        "--set engine.memory_utilization={}",
        "weights, KV and adapters of a process; a step's own memory comes on top",
        example="0.9",
    ),
    alias(
        "--kv-cache-memory-bytes",
        "--kv-cache-gb {}",
        "`g` means 1,000,000,000 and `G` 1,073,741,824",
        convert="bytes_to_gb",
        example="2e9",
    ),
    alias("--kv-offloading-size", "--set engine.host_arena_mb={}", convert="gib_to_mb"),
    only("--kv-offloading-backend", ("native",), "KV that leaves the device goes to engine.host_arena_mb"),
    unused("--swap-space", "engine.host_arena_mb says how much KV the host keeps"),
    only("--cpu-offload-gb", ("0", "0.0"), "weights stay on the device; --quantize makes them smaller"),
    refused("--num-gpu-blocks-override", "give --kv-cache-gb"),
    only(
        "--kv-cache-dtype",
        ("auto", "bfloat16"),
        "KV has the dtype of the model; omit the option, and give --kv-cache-gb for more room",
    ),
    unused("--calculate-kv-scales", "KV is not quantised", "flag"),
    setting("--block-size", "engine.block_size"),
    switch("--enable-prefix-caching", "engine.prefix_caching", "on by default"),
    unused("--prefix-caching-hash-algo", "prefixes are compared token by token"),
    unused("--disable-hybrid-kv-cache-manager", "one cache has KV of all layers", "flag"),
    only("--kv-transfer-config", ("", "{}"), _PEERS),
    setting("--kv-events-config", "engine.kv_events", "over ZeroMQ alone"),
)
"""Device and host memory."""
SCHEDULING = (
    same("--max-num-seqs"),
    same("--max-num-batched-tokens", "`k` means 1,000 and `K` 1,024", convert="count"),
    unused(
        "--enable-chunked-prefill",
        "a prompt above --max-num-batched-tokens is always computed in chunks; give more to compute it whole",
        "flag",
    ),
    VllmOption(
        ("--async-scheduling",),
        "flag",
        {
            "true": "--set engine.async_scheduling=on",
            "false": "--set engine.async_scheduling=off",
            **{word: f"--set engine.async_scheduling={word}" for word in ("auto", "on", "off")},
        },
        "a word may follow: auto, on or off",
        own=True,
    ),
    only("--scheduling-policy", ("fcfs", "priority"), "choose fcfs or priority"),
    unused("--num-scheduler-steps", _SCHEDULE),
    unused("--multi-step-stream-outputs", _SCHEDULE, "flag"),
    unused("--scheduler-delay-factor", _SCHEDULE),
    unused("--max-num-partial-prefills", _SCHEDULE),
    unused("--max-long-partial-prefills", _SCHEDULE),
    unused("--long-prefill-token-threshold", _SCHEDULE),
    unused("--num-lookahead-slots", _SCHEDULE),
    unused("--preemption-mode", "what leaves the device is chosen by --cache-policy"),
    unused("--stream-interval", "each step is a chunk"),
    refused("--scheduler-cls", _CODE),
    flag("--enforce-eager", "--eager", "--set engine.eager=false"),
    unused("--compilation-config -O -cc", _COMPILED),
    unused("--optimization-level", _COMPILED),
    unused("--performance-mode", _COMPILED),
    unused("--max-seq-len-to-capture", _COMPILED),
    unused("--cuda-graph-sizes", _COMPILED, "values"),
    unused("--cudagraph-capture-sizes", _COMPILED, "values"),
    unused("--max-cudagraph-capture-size", _COMPILED),
    unused("--disable-cascade-attn", "kernels are chosen here", "flag"),
    unused("--attention-backend", "kernels are chosen here"),
    unused("--moe-backend", "kernels are chosen here"),
    unused("--disable-async-output-proc", "answers are made in the front end", "flag"),
    unused("--use-v2-block-manager", "there is one cache", "flag"),
    unused("--tokenizer-pool-size", "front ends tokenize; --front-ends says how many"),
)
"""Steps and their batches."""
ADAPTERS = (
    flag(
        "--enable-lora",
        "",
        None,
        "adapters are always served; without any the base model answers alone, and --api-key keeps others "
        "from loading one",
    ),
    same("--max-loras"),
    same("--max-lora-rank", "no limit by default; an adapter above it is refused when its file is read"),
    unused(
        "--max-cpu-loras",
        "the server keeps every adapter that was loaded; engine.host_arena_mb bounds memory",
    ),
    same(
        "--lora-modules",
        'also as JSON, {"name": ..., "path": ..., "base_model_name": ...}',
        takes="values",
        example="",
    ),
    only("--lora-dtype", ("auto",), "adapters have the dtype of the model; give --dtype"),
    unused("--fully-sharded-loras", "--tensor-parallel divides adapters as it divides weights", "flag"),
    unused("--specialize-active-lora", "kernels take any number of adapters", "flag"),
    unused("--lora-extra-vocab-size", "an adapter that adds tokens is refused when its file is read"),
    off("--enable-lora-bias", "lora_bias is served on a CPU without an option; leave the option out"),
    refused("--long-lora-scaling-factors", "omit the option; adapters with a longer context are not served"),
    refused("--lora-target-modules", "omit the option; an adapter is served with all its modules"),
    only("--default-mm-loras", ("{}",), _FIXED_ADAPTERS),
    off("--enable-prompt-adapter", "prompt adapters are not served; train a LoRA adapter"),
    refused("--qlora-adapter-name-or-path", "give the adapter by --lora-modules"),
)
"""LoRA."""
HTTP = (
    same("--host", "127.0.0.1 by default, in vLLM all addresses"),
    same("--port"),
    same("--api-key", "or VLLM_API_KEY; the key is an administrator's", takes="values", example="secret"),
    alias("--ssl-certfile", "--tls-cert {}"),
    alias("--ssl-keyfile", "--tls-key {}"),
    only("--ssl-cert-reqs", ("0",), "certificates of clients are not checked; let a proxy check them"),
    refused("--ssl-ca-certs", "certificates of clients are not checked; let a proxy check them"),
    refused("--ssl-ciphers", "the system's OpenSSL decides; let a proxy choose"),
    unused(
        "--enable-ssl-refresh",
        "restart the server after a certificate has changed, or with --config send SIGHUP",
        "flag",
    ),
    alias("--allowed-origins", "--set front_end.cors_origins={}", convert="origins", example='["*"]'),
    only("--allowed-methods", ('["*"]',), _CORS),
    only("--allowed-headers", ('["*"]',), _CORS),
    off("--allow-credentials", "send keys in the header Authorization; omit the option"),
    only("--root-path", ("", "/"), "let the proxy strip the prefix before it passes a request on"),
    refused("--uds", "give --host and --port; front_end.admin_address may be a socket"),
    refused("--middleware", _CODE),
    flag("--disable-fastapi-docs", "--set front_end.docs_page=false", "--set front_end.docs_page=true"),
    unused("--enable-offline-docs", "the page at /docs loads nothing from elsewhere", "flag"),
    alias("--shutdown-timeout", "--set front_end.drain_s={}"),
    unused("--uvicorn-log-level", _LOGS),
    unused("--disable-uvicorn-access-log", _LOGS, "flag"),
    unused("--disable-access-log-for-endpoints", _LOGS),
    unused("--disable-log-requests", _LOGS, "flag"),
    unused("--enable-log-requests", _LOGS_WITH, "flag"),
    unused("--enable-log-outputs", _LOGS_WITH, "flag"),
    unused("--enable-log-deltas", _LOGS_WITH, "flag"),
    unused("--max-log-len", _LOGS),
    unused("--log-config-file", "--log-level says how much is logged"),
    unused("--log-error-stack", "an error of the server is logged with its stack", "flag"),
    unused("--disable-log-stats", _LOGS, "flag"),
    unused("--enable-server-load-tracking", "/load and /metrics always have the load", "flag"),
    unused("--enable-scale-out", "/inference/v1/generate and the render paths are always there", "flag"),
    unused("--enable-tokenizer-info-endpoint", "/tokenizer_info is always there", "flag"),
    unused("--otlp-traces-endpoint", _TRACES),
    unused("--collect-detailed-traces", _TRACES),
    unused("--show-hidden-metrics-for-version", "every metric is shown"),
    unused("--h11-max-incomplete-event-size", "front_end.max_header_bytes bounds the head of a request"),
    unused("--h11-max-header-count", "a request may have 128 headers"),
    unused("--enable-request-id-headers", "every answer has X-Request-Id", "flag"),
    unused("--enable-prompt-tokens-details", "usage always has prompt_tokens_details", "flag"),
    switch("--enable-force-include-usage", "front_end.force_include_usage"),
    switch("--enable-per-request-metrics", "front_end.per_request_metrics"),
    switch("--return-tokens-as-token-ids", "front_end.return_tokens_as_token_ids"),
    switch("--enable-return-routed-experts", "front_end.return_routed_experts"),
    switch("--tokens-only", "front_end.tokens_only"),
    off("--grpc", "omit the option; the server speaks HTTP"),
    flag("--enable-auto-tool-choice", "", "--set front_end.tool_call_parser=none", _WITH_PARSER),
    same(
        "--tool-call-parser",
        "no plugin is read; choose one of these, or auto",
        **{one: f"--set front_end.tool_call_parser={ours or one}" for one, ours in _TOOL_PARSERS.items()},
    ),
    refused("--tool-parser-plugin", _TOOLS),
    refused("--tool-server", _TOOLS),
    off(
        "--exclude-tools-when-tool-choice-none",
        "the template sees the tools; leave tools out of the request, and omit the option",
    ),
    same(
        "--reasoning-parser",
        "no plugin is read; choose one of these, or auto",
        **{
            one: f"--set front_end.reasoning_parser={ours or one}" for one, ours in _REASONING_PARSERS.items()
        },
    ),
    only(
        "--reasoning-config",
        ("{}", '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'),
        "the reasoning parser has its marks",
    ),
    setting("--chat-template", "engine.chat_template"),
    only("--chat-template-content-format", ("auto",), "the template's own form is used; omit the option"),
    off("--trust-request-chat-template", "give the template at the start, by --chat-template"),
    setting("--default-chat-template-kwargs", "engine.chat_template_kwargs"),
    only("--response-role", ("assistant",), "answers have the role assistant; omit the option"),
    only("--additional-config", ("{}",), "omit the option; it is for other platforms"),
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
"""Heading of --help-vllm → options."""


def by_name() -> dict[str, VllmOption]:
    """Name → option, short names too."""
    return {name: one for group in VLLM_OPTIONS.values() for one in group for name in one.names}
