# SPDX-License-Identifier: Apache-2.0
"""Two, four and again two instances under steady load, then a drain and SIGTERM.

    python -m bench.cluster.bench_elastic [--layouts] [--rate 3] [--phase-s 40] [--out FILE] [--plot FILE.png]

Real: front end, instances, scheduling, moves, the demo model and eight adapters.  Emulated: the times of
steps, which sleep, so that cores are idle.  Run in a control group of the processor: there the kernel
compares the nice values of sessions.  Requests arrive at a fixed rate, whatever the answers.  A request
belongs to the phase of the arrival.  `POST /v1/instances/scale` changes the number; new processes start at
the lowest priority.  Arrivals end with SIGTERM; open requests have the server's grace period.  One record:
figures of each phase, and (arrival, TTFT, end) of each request in seconds.  --layouts: the number stays two,
and their LoRA Server goes from EP2-PP1 to EP4-PP1 and back, by `POST /v1/lora_server/layout`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.harness.records import ROOT, Recorder

STEP_S = 0.25
"""Paced time of a decode step, and of the prompts of a step."""
NUM_LAYERS = 4
NUM_TOKENS = 12
TIMEOUT_S, START_S, WARM_S = 60.0, 1500.0, 10.0
GOAL = 1.5
TWO, STARTING, FOUR, LEAVING, AGAIN, DRAINED, ENDED = PHASES = (
    "two",
    "starting",
    "four",
    "leaving",
    "two again",
    "drained",
    "SIGTERM",
)
EP2, TO_EP4, EP4, TO_EP2, EP2_AGAIN = "EP2", "to EP4", "EP4", "to EP2", "EP2 again"


def serve(port: int, *, layouts: bool) -> None:
    """Serve the demo on paced devices until a signal."""
    import logging
    from dataclasses import replace

    from moe_lora import assemble
    from moe_lora.config import EmulationConfig, EngineConfig, FrontEndConfig
    from moe_lora.config.cluster import ClusterConfig
    from moe_lora.config.optional_parts import LoraServerConfig, ScalingConfig, StageTime, StepProfile

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    layer = StageTime(fixed_s=STEP_S / NUM_LAYERS)
    engine = EngineConfig(
        model_dir=str(ROOT / "demo/model"),
        adapters=tuple((name, str(ROOT / "demo/adapters" / name)) for name in adapter_names()),
        num_instances=2,
        num_threads=1,
        eager=True,
        emulation=EmulationConfig(step_profile=StepProfile(attention=layer, prefill=layer)),
    )
    # The rule never acts within a run: `scale` alone changes the number.
    scaling = ScalingConfig(min_instances=2, max_instances=4, waiting_high=1000, remove_pause_s=1800)
    front_end = FrontEndConfig(host="127.0.0.1", port=port)
    cluster = ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end)
    own = {"lora_server": LoraServerConfig(layout="EP2-PP1")} if layouts else {"scaling": scaling}
    assemble.serve(replace(cluster, **own))


def adapter_names() -> list[str]:
    """Eight adapters of the demo."""
    return sorted(one.parent.name for one in (ROOT / "demo/adapters").glob("*/adapter_config.json"))[:8]


class Load:
    """Requests at a fixed rate until `over`.  answers: (arrival, TTFT, end, status) in seconds."""

    def __init__(self, http: httpx.AsyncClient, rate_per_s: float) -> None:
        self._http, self._rate_per_s = http, rate_per_s
        self._begin_s = time.monotonic()
        self.over = False
        self.answers: list[tuple[float, float | None, float, int]] = []

    def now_s(self) -> float:
        """Seconds since the first arrival."""
        return time.monotonic() - self._begin_s

    async def run(self) -> None:
        """Send requests, and wait for all answers."""
        requests: list[asyncio.Task[None]] = []
        for name in itertools.cycle(adapter_names()):
            await asyncio.sleep(len(requests) / self._rate_per_s - self.now_s())
            if self.over:
                break
            requests.append(asyncio.create_task(self._send(name)))
        await asyncio.gather(*requests)

    async def _send(self, name: str) -> None:
        arrival_s, first_s, status, finished = self.now_s(), None, 0, False
        body = {"model": name, "prompt": "hello=", "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS}
        try:
            async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                status = answer.status_code
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and first_s is None:
                        first_s = self.now_s() - arrival_s
                    status = 500 if '"error"' in line else status
                    finished |= line == "data: [DONE]"
        except httpx.HTTPError:
            status = 0
        self.answers.append((arrival_s, first_s, self.now_s(), status if finished or status != 200 else 0))


async def run_phases(
    http: httpx.AsyncClient, load: Load, given: argparse.Namespace, end: Any
) -> list[tuple[str, float, float]]:
    """Change the number of instances, or the layout; (phase, begin, end) in seconds."""
    found: list[tuple[str, float, float]] = []

    async def phase(name: str, work: Any) -> None:
        began_s = load.now_s()
        answer = await work
        if answer is not None:
            answer.raise_for_status()
        found.append((name, began_s, load.now_s()))
        print(f"{name:10} {began_s:6.1f} to {load.now_s():6.1f} s", flush=True)

    async def scale(number: int) -> httpx.Response:
        return await http.post(f"/v1/instances/scale?number={number}&limit_s={START_S:g}", timeout=START_S)

    async def drained() -> httpx.Response:
        (await http.post("/v1/instances/instance-1/drain", timeout=START_S)).raise_for_status()
        await asyncio.sleep(phase_s / 2)
        return await http.post("/v1/instances/instance-1/undrain", timeout=START_S)

    async def change(layout: str) -> httpx.Response:
        where = f"/v1/lora_server/layout?layout={layout}&limit_s={START_S:g}"
        return await http.post(where, timeout=START_S)

    phase_s = given.phase_s
    await asyncio.sleep(WARM_S)
    if given.layouts:
        await phase(EP2, asyncio.sleep(phase_s))
        await phase(TO_EP4, change("EP4-PP1"))
        await phase(EP4, asyncio.sleep(phase_s))
        await phase(TO_EP2, change("EP2-PP1"))
        await phase(EP2_AGAIN, asyncio.sleep(phase_s))
    else:
        await phase(TWO, asyncio.sleep(phase_s))
        await phase(STARTING, scale(4))
        await phase(FOUR, asyncio.sleep(phase_s))
        await phase(LEAVING, scale(2))
        await phase(AGAIN, asyncio.sleep(phase_s))
        await phase(DRAINED, drained())
    await asyncio.sleep(2 * NUM_TOKENS * STEP_S)  # until streams are under way at both again
    found.append((ENDED, found[-1][2], load.now_s()))
    load.over = True
    end()
    return found


def figures(
    answers: Sequence[tuple[float, float | None, float, int]], phases: Sequence[tuple[str, float, float]]
) -> dict[str, dict[str, Any]]:
    """Requests, failures and TTFT of each phase."""
    found: dict[str, dict[str, Any]] = {}
    for name, begin_s, end_s in phases:
        here = [one for one in answers if begin_s <= one[0] < end_s]
        firsts_s = [first_s for _, first_s, _, status in here if status == 200 and first_s is not None]
        p50, p95 = np.percentile(firsts_s, [50, 95]) if firsts_s else (np.nan, np.nan)
        found[name] = {
            "begin_s": round(begin_s, 2),
            "end_s": round(end_s, 2),
            "requests": len(here),
            "failed": sum(status != 200 for *_, status in here),
            "ttft_p50_s": round(float(p50), 3),
            "ttft_p95_s": round(float(p95), 3),
        }
    return found


async def measure(url: str, process: subprocess.Popen[bytes], given: argparse.Namespace) -> dict[str, Any]:
    """The result of a run."""
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
        load = Load(http, given.rate)
        sending = asyncio.create_task(load.run())
        phases = await run_phases(http, load, given, lambda: process.send_signal(signal.SIGTERM))
        await sending
    answers = sorted(load.answers)
    by_phase = figures(answers, phases)
    first, *others = by_phase
    steady = [by_phase[name]["ttft_p95_s"] for name in others if name != STARTING]
    return {
        "phases": by_phase,
        "failed": sum(status != 200 for *_, status in answers),
        "worst_p95_ratio": round(max(steady) / by_phase[first]["ttft_p95_s"], 2),
        "answers": [
            (round(arrival_s, 2), None if first_s is None else round(first_s, 3), round(end_s, 2), status)
            for arrival_s, first_s, end_s, status in answers
        ],
    }


def write_plot(result: dict[str, Any], path: Path) -> None:
    """TTFT of each request by arrival, and P95 of each phase."""
    from moe_lora.report.plots import FAILED, GRAY, color, label, new_figure

    figure, axes = new_figure(3.6)
    axis = axes[0, 0]
    good = [(arrival_s, first_s) for arrival_s, first_s, _, status in result["answers"] if status == 200]
    bad_s = [arrival_s for arrival_s, _, _, status in result["answers"] if status != 200]
    axis.plot(*zip(*good, strict=True), ".", color=color(0), markersize=3, label="a request")
    axis.plot(bad_s, [0.0] * len(bad_s), "x", color=FAILED, label=f"failed: {len(bad_s)}")
    for number, (name, one) in enumerate(result["phases"].items()):
        middle_s = (one["begin_s"] + one["end_s"]) / 2
        times_s, p95_s = (one["begin_s"], one["end_s"]), one["ttft_p95_s"]
        axis.plot(times_s, (p95_s, p95_s), color=color(1), label="" if number else "P95 of a phase")
        axis.axvline(one["begin_s"], color=GRAY, linewidth=0.6)
        top = 0.98 if number % 2 else 0.91
        axis.text(
            middle_s, top, name, transform=axis.get_xaxis_transform(), ha="center", va="top", fontsize=8
        )
    first, *_ = result["phases"]
    limit_s = GOAL * result["phases"][first]["ttft_p95_s"]
    axis.axhline(limit_s, color=FAILED, linestyle="--", linewidth=1, label=f"1.5 x P95 at {first}")
    highest_s = max(limit_s, *(first_s for _, first_s in good))
    axis.set_ylim(-0.02, 1.25 * highest_s)
    label(axis, "", "arrival, s", "TTFT, s")
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8.5)
    figure.savefig(path)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Start a server, measure, and wait for the server's end."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile() as log:
        command = [sys.executable, "-m", "bench.cluster.bench_elastic", "--serve", str(port)]
        command += ["--layouts"] if given.layouts else []
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            deadline_s = time.monotonic() + START_S
            while b"Serving" not in (said := Path(log.name).read_bytes()):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the server did not start:\n{said.decode()[-3000:]}")
                time.sleep(0.1)
            result = asyncio.run(measure(url, process, given))
            result["exit_code"] = process.wait(START_S)
        finally:
            process.kill()
            process.wait()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", action="store_true", help="change the LoRA Server's layout")
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s")
    parser.add_argument("--phase-s", type=float, default=40.0)
    parser.add_argument("--out", help="file of the records  [default: none]")
    parser.add_argument("--plot", type=Path, help="figure of the run")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, layouts=given.layouts)
        return
    recorder = Recorder(given.out, kind="emulated")
    result = run(given) | {"load_1_min": round(os.getloadavg()[0], 1)}
    name = "elastic_layouts" if given.layouts else "elastic"
    config = {"bench": name, "rate": given.rate, "phase_s": given.phase_s, "step_s": STEP_S}
    recorder(config | {"tokens": NUM_TOKENS, "adapters": len(adapter_names())}, result)
    for name, one in result["phases"].items():
        counts = f"{one['requests']:4} requests, {one['failed']} failed"
        print(f"{name:10} {counts}, TTFT P95 {one['ttft_p95_s']:.3f} s")
    print(f"failed: {result['failed']}; worst P95 beside starts: {result['worst_p95_ratio']} of the first's")
    if given.plot is not None:
        write_plot(result, given.plot)


if __name__ == "__main__":
    main()
