# SPDX-License-Identifier: Apache-2.0
"""From the first to the second token of a long prompt: KV sent after the prompt, and beside its steps.

    python -m bench.cluster.bench_prompt_handoff [--rounds 7] [--out FILE]

Two engines of this process: one computes prompts, one goes on.  Steps are paced (emulated), and a link of a
stated rate carries the KV.  Prompts of eight steps, one at a time; both ways by turns, in an order that each
round reverses.

Expected before the first run, for S steps of c seconds whose KV takes r c on the link, and a decode step d:
after the prompt S r c + d; beside it r c + d for r <= 1 (the last step's pages remain), and S r c - (S - 1) c
+ d above.  Mixtral 8x7B has 128 KiB a token: a step of 2,048 tokens (0.13 s at 40 % of an H100) fills
256 MiB, so r is 0.16 at 100 Gbit/s, 0.65 at 25 Gbit/s, 1.6 at 10 Gbit/s.  Layers of the last step, sent one
by one, would save 31/32 of r c more: of a prompt of eight steps 0.02 and 0.07 of the seconds to the second
token.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click

from bench.harness.random_model import QUICK, write_model
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.api import InProcessClient
from moe_lora.config import EmulationConfig, EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.migration import RequestMover
from moe_lora.dist.cluster.routing_client import FleetClient, make_client
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import REQUEST_METHODS, Call, Command
from moe_lora.policies.routing.routers import LeastOutstanding

NUM_STEPS, STEP_TOKENS, STEP_S, DECODE_S = 8, 256, 0.2, 0.02
WAKE_UP_S = 0.05
"""A put that comes so late after the one before was delayed by this machine, not by the link."""
RATIOS = (0.16, 0.65, 1.6)
"""Seconds on the link by seconds of compute."""
WAYS = ("after the prompt", "beside its steps")


@dataclass
class Link:
    """One put at a time, at bytes_per_s."""

    bytes_per_s: float
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0

    def attach(self, client: InProcessClient) -> None:
        transport: Any = client.core.moves._kv._transport
        put = transport.put_signal

        def slow_put(window: Any, offset: int, data: Any, *signal: int) -> None:
            with self._lock:
                now_s = time.monotonic()
                begin_s = now_s if now_s - self._free_s > WAKE_UP_S else self._free_s
                self._free_s = begin_s + data.nbytes / self.bytes_per_s
                self.num_bytes += data.nbytes
                time.sleep(max(0.0, self._free_s - time.monotonic()))
            put(window, offset, data, *signal)

        transport.put_signal = slow_put


def send_as_a_link(client: InProcessClient, command: Command) -> None:
    """Calls about a move are answered beside a step, as over a link."""
    inbox = client._loop.inbox
    if isinstance(command, Call) and command.method in REQUEST_METHODS and inbox.answers(command):
        return
    inbox.put(command)


@contextmanager
def two_engines(folder: Path) -> Iterator[list[InProcessClient]]:
    layers = QUICK.num_layers
    profile = StepProfile(
        attention=StageTime(fixed_s=DECODE_S / layers),
        prefill=StageTime(per_row_s=STEP_S / STEP_TOKENS / layers),
    )
    config = EngineConfig(
        model_dir=str(write_model(folder / "model", QUICK)),
        device="cpu",
        eager=True,
        num_threads=1,
        max_model_len=NUM_STEPS * STEP_TOKENS + 64,
        max_num_batched_tokens=STEP_TOKENS,
        prefix_caching=False,
        kv_cache_gb=0.05,
        emulation=EmulationConfig(step_profile=profile),
    )
    clients = [InProcessClient(build_engine(replace(config, instance=name))) for name in ("0", "1")]
    for client in clients:
        client._send = partial(send_as_a_link, client)
    try:
        yield clients
    finally:
        for client in clients:
            client.shut_down()


def make_fleet(clients: list[InProcessClient]) -> FleetClient:
    front_end = FrontEndConfig(prefill_instances=("0",), engines_address="/run/engines")
    engine = EngineConfig(model_dir="model")
    cluster = ClusterConfig(engine=engine, served_model_name="model", front_end=front_end)
    registry = InstanceRegistry(clients, ())
    routes = Routes(config=front_end, router=LeastOutstanding(), meter=None, ranks={})
    return make_client(cluster, registry, routes, FleetAdapters(registry, routes.ranks).call)


async def ask(fleet: FleetClient, name: str) -> tuple[float, float, list[int]]:
    """Seconds to the first token and from there to the second, and all tokens."""
    prompt = tuple(3 + 7 * place % (QUICK.vocab_size - 3) for place in range(NUM_STEPS * STEP_TOKENS))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    request = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    begin_s = time.perf_counter()
    times: list[float] = []
    tokens: list[int] = []
    async for output in fleet.generate(request):
        times += [time.perf_counter()] * len(output.token_ids)
        tokens += output.token_ids
    return times[0] - begin_s, times[1] - times[0], tokens


async def run(clients: list[InProcessClient], rounds: int, recorder: Recorder) -> None:
    link = Link(1e9)
    link.attach(clients[0])
    fleet = make_fleet(clients)
    _, _, expected = await ask(fleet, "warm up")
    num_bytes, move_ahead = link.num_bytes, RequestMover.move_ahead
    for number in range(rounds):
        for ratio in RATIOS:
            link.bytes_per_s = num_bytes / (NUM_STEPS * ratio * STEP_S)
            for way in WAYS[:: 1 if number % 2 else -1]:
                link.num_bytes, moved = 0, fleet.mover.num_moved["kv"]
                start = move_ahead if way == WAYS[1] else lambda *_: None
                with patch.object(RequestMover, "move_ahead", start):
                    first_s, second_s, tokens = await ask(fleet, f"{number} {ratio} {way}")
                assert tokens == expected
                assert fleet.mover.num_moved["kv"] == moved + 1
                config = {"way": way, "ratio": ratio, "round": number, "num_steps": NUM_STEPS}
                config |= {"step_s": STEP_S, "decode_s": DECODE_S, "step_tokens": STEP_TOKENS}
                result = {"first_s": first_s, "second_s": second_s, "sent_bytes": link.num_bytes}
                recorder(config, result | {"load_1_min": round(os.getloadavg()[0], 1)})


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--out", default=None, metavar="FILE")
def main(rounds: int, out: str | None) -> None:
    """Record each way and rate by turns, and show medians (worst) in ms."""
    recorder = Recorder(out, "emulated")
    with tempfile.TemporaryDirectory() as name, two_engines(Path(name)) as clients:
        asyncio.run(run(clients, rounds, recorder))
    rows = []
    for ratio in RATIOS:
        for way in WAYS:
            found = [one["result"] for one in recorder.records if _is(one["config"], way, ratio)]
            times = {key: [1000 * one[key] for one in found] for key in ("first_s", "second_s")}
            shown = {key: f"{median(values):.0f} ({max(values):.0f})" for key, values in times.items()}
            rows.append({"link / compute": ratio, "KV goes": way, **shown})
    click.echo(table(rows, "ms"))


def _is(config: dict[str, Any], way: str, ratio: float) -> bool:
    return (config["way"], config["ratio"]) == (way, ratio)


if __name__ == "__main__":
    main()
