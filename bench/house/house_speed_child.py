# SPDX-License-Identifier: Apache-2.0
"""What `house_speed` times, run in a checkout by the interpreter that has it installed.

    PYTHON house_speed_child.py PART

Writes the names of what the part times, then answers each line of stdin, {"what": name, "num_steps": N}, with
seconds.  Needs the standard library and the checkout; what differs between module layouts is in `LAYOUTS`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

LAYOUTS = {
    "folders": {
        "InstanceLoad": "moe_lora.policies.routing.routing:InstanceLoad",
        "LeastOutstanding": "moe_lora.policies.routing.routing:LeastOutstanding",
        "AdapterAffinity": "moe_lora.policies.routing.routers:AdapterAffinity",
        "CacheCosts": "moe_lora.timing.host_times:CacheCosts",
        "make_caching_policy": "moe_lora.policies.caching.caching:make_caching_policy",
    },
    "flat": {
        "InstanceLoad": "moe_lora.policies.routing:InstanceLoad",
        "LeastOutstanding": "moe_lora.policies.routing:LeastOutstanding",
        "AdapterAffinity": "moe_lora.policies.routers:AdapterAffinity",
        "CacheCosts": "moe_lora.policies.caching:CacheCosts",
        "make_caching_policy": "moe_lora.policies.caching_policies:make_caching_policy",
    },
}
ALIKE = {
    "command line": "moe_lora.cli.main:main",
    "front end": "moe_lora.serve.server:serve_forever",
    "library": "moe_lora.api:LLM",
    "lora_server_processes": "bench.harness.processes:lora_server_processes",
    "build_engine": "moe_lora.engine.build:build_engine",
    "EngineConfig": "moe_lora.config:EngineConfig",
    "LoraServer": "moe_lora.config:LoraServerConfig",
    "GenerateRequest": "moe_lora.core.request:GenerateRequest",
    "SamplingParams": "moe_lora.core.request:SamplingParams",
    "UnifiedCache": "moe_lora.cache.unified:UnifiedCache",
}
NUM_ADAPTERS, PROMPT_TOKENS, MOST_REQUESTS = 8, 33, 64
NUM_INSTANCES, NUM_ROUTED = 16, 512
CACHED_ADAPTERS, CONVERSATIONS, BLOCK_SIZE, TURN_TOKENS = 200, 1000, 16, 48


LAYOUTS["folders with costs in policies"] = LAYOUTS["folders"] | {
    "CacheCosts": "moe_lora.policies.caching.caching:CacheCosts"
}
POLICIES_APART = {"make_caching_policy": "moe_lora.policies.caching.caching_policies:make_caching_policy"}


def has(module: str) -> bool:
    """True if the measured checkout has the module; False below a file, too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def named(name: str) -> Any:
    """An object of the measured checkout."""
    layout = LAYOUTS["folders" if has("moe_lora.timing") else "flat"]
    if has("moe_lora.timing") and not has("moe_lora.timing.host_times"):
        layout = LAYOUTS["folders with costs in policies"]
    if has("moe_lora.timing") and has("moe_lora.policies.caching.caching_policies"):
        layout = layout | POLICIES_APART
    layout = ALIKE | layout
    if not has("bench.harness.processes"):
        layout["lora_server_processes"] = "moe_lora.assemble:lora_server_processes"
    module, _, attribute = layout[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class Decode:
    """Decode steps of the demo's model in lockstep, on one engine thread."""

    def __init__(self, stack: ExitStack, *, lora_server: bool) -> None:
        demo = Path("demo").resolve()
        folders = sorted(path.parent for path in demo.glob("adapters/*/adapter_config.json"))[:NUM_ADAPTERS]
        self._adapters = tuple((folder.name, str(folder)) for folder in folders)
        config = named("EngineConfig")(
            model_dir=str(demo / "model"),
            adapters=self._adapters,
            num_threads=1,
            max_loras=NUM_ADAPTERS,
            max_num_seqs=MOST_REQUESTS,
            max_num_batched_tokens=MOST_REQUESTS * PROMPT_TOKENS,
            max_model_len=256,
        )
        server = named("LoraServer")(capacity=NUM_ADAPTERS) if lora_server else None
        config = stack.enter_context(named("lora_server_processes")(config, server))
        self._core = named("build_engine")(config)
        stack.callback(self._core.close)
        self._num_runs = 0

    def __call__(self, num_requests: int, num_steps: int) -> float:
        """Seconds of the steps; the prefill, and the wait for adapters, come before."""
        core = self._core
        sampling = named("SamplingParams")(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
        self._num_runs += 1
        for number in range(num_requests):
            core.add_request(
                named("GenerateRequest")(
                    request_id=f"{self._num_runs}-{number}",
                    prompt_token_ids=tuple(5 + (number + i) % 90 for i in range(PROMPT_TOKENS)),
                    adapter=self._adapters[number % NUM_ADAPTERS][0],
                    sampling=sampling,
                )
            )
        started: set[str] = set()
        while len(started) < num_requests:
            started.update(output.request_id for output in core.step())
        begin = time.perf_counter()
        num_tokens = sum(len(core.step()) for _ in range(num_steps))
        taken_s = time.perf_counter() - begin
        while core.has_work:
            core.step()
        assert core.stats().lora_server_fallback_rows == 0, "the instance computed deltas of the LoRA Server"
        return taken_s * num_requests * num_steps / num_tokens


def routing(router: Any) -> Callable[[int], float]:
    """Decisions over instances with requests, each booked as it comes, starts and ends."""
    rng = Random(0)
    instances = [
        SimpleNamespace(index=i, outstanding_tokens=0, load=named("InstanceLoad")())
        for i in range(NUM_INSTANCES)
    ]
    requests = [
        SimpleNamespace(
            adapter=f"adapter-{int(200 * rng.random() ** 2)}", prompt_tokens=rng.randrange(8, 500)
        )
        for _ in range(NUM_ROUTED)
    ]
    under_way: list[tuple[Any, Any]] = []

    def decide(num_steps: int) -> float:
        begin = time.process_time()
        for number in range(num_steps):
            request = requests[number % NUM_ROUTED]
            chosen = router.choose(request, instances)
            chosen.outstanding_tokens += request.prompt_tokens
            chosen.load.add(request.adapter, request.prompt_tokens)
            chosen.load.start(request.adapter, request.prompt_tokens)
            under_way.append((chosen, request))
            if len(under_way) > NUM_INSTANCES * 8:
                left, ended = under_way.pop(0)
                left.outstanding_tokens -= ended.prompt_tokens
                left.load.end(ended.adapter, ended.prompt_tokens, started=True)
        return time.process_time() - begin

    return decide


def bookkeeping() -> Callable[[int], float]:
    """Turns of conversations whose history is on the device: match, grow, publish, release."""
    cache = named("UnifiedCache")(
        num_device_pages=200_000,
        num_host_pages=0,
        block_size=BLOCK_SIZE,
        policy=named("make_caching_policy")("cost-aware", named("CacheCosts")(page_bytes=1 << 20)),
    )
    for owner in range(1, CACHED_ADAPTERS + 1):
        cache.add_adapter(owner, (1,) * 8, 0.0)
    rng = Random(0)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns = itertools.count()

    def confirm() -> None:
        for order in cache.take_orders():
            cache.copied(order.copy_id)

    def turn(number: int) -> float:
        owner, now_s = number % CACHED_ADAPTERS + 1, 0.018 * next(turns)
        tokens = histories[number] + [rng.randrange(32_000) for _ in range(TURN_TOKENS)]
        histories[number] = tokens if len(tokens) < 8 * TURN_TOKENS else []
        cache.hold(owner, now_s)
        confirm()
        begin = time.process_time()
        table = cache.match(owner, tokens, now_s)
        cache.grow(table, len(tokens), now_s)
        cache.publish(table, tokens, len(tokens), now_s)
        cache.release(table, now_s)
        taken_s = time.process_time() - begin
        cache.let_go(owner, now_s)
        confirm()
        return taken_s

    for number in [*range(CONVERSATIONS)] * 2:
        turn(number)
    return lambda num_steps: sum(turn(rng.randrange(CONVERSATIONS)) for _ in range(num_steps))


def importing(name: str) -> Callable[[int], float]:
    """The import itself: once in a process."""

    def load(num_steps: int) -> float:
        begin = time.perf_counter()
        named(name)
        return (time.perf_counter() - begin) * num_steps

    return load


def timed(part: str, stack: ExitStack) -> dict[str, Callable[[int], float]]:
    """What a part times, by name."""
    if part == "imports":
        return {name: importing(name) for name in ("command line", "library", "front end")}
    if part == "decisions":
        return {
            "routing, least outstanding": routing(named("LeastOutstanding")()),
            "routing, adapter affinity": routing(named("AdapterAffinity")()),
            "cache, match and update": bookkeeping(),
        }
    decode = Decode(stack, lora_server=part == "lora_server")
    return {f"{n} requests": partial(decode, n) for n in (1, 16, MOST_REQUESTS)}


def main() -> None:
    found = find_spec("moe_lora")
    if found is None or not Path(str(found.origin)).is_relative_to(Path.cwd()):
        raise SystemExit(f"{sys.executable} has not {Path.cwd()} installed but {found and found.origin}")
    with ExitStack() as stack:
        calls = timed(sys.argv[1], stack)
        print(json.dumps(list(calls)), flush=True)
        for line in sys.stdin:
            call = json.loads(line)
            print(json.dumps(calls[call["what"]](call["num_steps"])), flush=True)


if __name__ == "__main__":
    main()
