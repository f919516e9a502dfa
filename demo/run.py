# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve the demo's adapters beside the model and on a LoRA Server, once where they fit and once
where they don't, and say which was faster, whichever it was; leaves nothing behind but the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .emulated import EMULATES, SLOWDOWN
from .tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text

HERE = Path(__file__).parent
START_TIMEOUT_S = 120.0
PROMPTS_PER_LENGTH = 24
SHOWN = ("reverse", "upper", "rot13", "dashes")
MOE_LORA = [sys.executable, "-m", "moe_lora.cli.main"]
SERVE = [*MOE_LORA, "serve", str(HERE / "model"), "--lora-dir", str(HERE / "adapters"), "--threads", "1"]
SLO_S = {"ttft": 0.25, "tpot": 0.1}
EMULATED_RATE_PER_S = 80.0
"""Of the emulated devices' time."""
WIN = 1.1
"""A P95 TTFT that many times another's is worse; less is noise."""


@dataclass(frozen=True)
class Run:
    """A system.  serve: what starts it, but for the port.  replay: what only its load client is told."""

    label: str
    serve: list[str]
    replay: list[str]


def runs_of(duration_s: str) -> list[Run]:
    here = ["--duration-s", duration_s, "--busiest"]
    emulated = ["--duration-s", duration_s, "--request-rate", f"{EMULATED_RATE_PER_S / SLOWDOWN:g}"]
    emulated += [f"--slo-{name}-s={SLOWDOWN * goal_s:g}" for name, goal_s in SLO_S.items()]
    device = [sys.executable, "-m", "demo.emulated"]
    return [
        Run("all fit: coupled", SERVE, here),
        Run("all fit: LoRA Server", [*SERVE, "--lora-server", "EP1-PP1"], here),
        Run("short of memory: coupled", [*device, "coupled"], [*emulated, "--emulates", EMULATES]),
        Run("short of memory: LoRA Server", [*device, "server"], [*emulated, "--emulates", EMULATES]),
    ]


def main() -> int:
    from moe_lora.report.html import write_report

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default=str(HERE / "trace.csv"), help="trace file (azure, burstgpt, ...)")
    parser.add_argument("--duration-s", default="20", help="send what arrives in this time, to each system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default=str(HERE), help="where report.html and results.jsonl go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Path(options.output_dir).resolve() / "report.html"
    found: list[dict[str, Any]] = []
    answers: list[str] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            prompts = Path(scratch) / "prompts.jsonl"
            num_adapters = write_prompts(prompts, random.Random(options.seed))
            plan = runs_of(options.duration_s)
            for number, run in enumerate(plan, 1):
                print(f"[{number}/{len(plan)}] {run.label}: starting the server", flush=True)
                with serving(run.serve, Path(scratch) / "server.log") as url:
                    answers = answers or shown_answers(url)
                    result = Path(scratch) / f"{number}.json"
                    replay(url, run, prompts, num_adapters, result, options)
                    found.append(json.loads(result.read_text()))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    lines = [*answers, *verdict(found)]
    write_report(report, found, "Many adapters, beside the model and on a LoRA Server", lines)
    print("", *(textwrap.fill(line, 100) for line in lines), f"Report: {report.as_uri()}", sep="\n")
    return 0


def verdict(found: list[dict[str, Any]]) -> list[str]:
    """What the four runs showed, whichever way it went."""
    coupled, server, short, short_server = found
    exact = [run["exact_answers"] for run in found]
    device = f"Emulated ({EMULATES})"
    return [
        f"Exact answers: {min(exact):.1%} to {max(exact):.1%} over the four runs, the same tasks in each.",
        "All adapters fit beside the model, measured here: "
        + compared(coupled, server)
        + ALL_FIT[faster(coupled, server)],
        f"Adapters don't fit. {device}: "
        + compared(short, short_server, SLOWDOWN)
        + SHORT_OF_MEMORY[faster(short, short_server)],
    ]


ALL_FIT = {
    "coupled": "Coupled is faster. Each layer's deltas make a round trip to the server, and a model this "
    "small computes nothing long enough to hide it behind. Where all fit, keep adapters beside the model.",
    "server": "The LoRA Server is faster, which is not expected here: the machine was probably busy.",
    "neither": "Neither is faster, which is not expected here: the machine was probably busy.",
}
SHORT_OF_MEMORY = {
    "coupled": "Coupled is faster: the LoRA Server did not pay in this run.",
    "server": "The LoRA Server is faster. A coupled instance has room for a few adapters beside its KV, so "
    "requests wait until a slot is free; on the server all that are in use fit.",
    "neither": "Neither is faster: the LoRA Server did not pay in this run.",
}


def faster(coupled: dict[str, Any], server: dict[str, Any]) -> str:
    """Which has the lower P95 TTFT: "coupled", "server" or, within WIN, "neither"."""
    ratio = server["p95_ttft_ms"] / coupled["p95_ttft_ms"]
    if ratio > WIN:
        return "coupled"
    return "server" if ratio < 1 / WIN else "neither"


def compared(coupled: dict[str, Any], server: dict[str, Any], slowdown: float = 1.0) -> str:
    """Both systems' numbers in a sentence, in the device's time."""
    parts = [
        f"{name} TTFT P95 {run['p95_ttft_ms'] / slowdown:.0f} ms, "
        f"TPOT {run['mean_tpot_ms'] / slowdown:.1f} ms, {run['slo_attainment']:.0%} within the SLO"
        for name, run in (("coupled", coupled), ("LoRA Server", server))
    ]
    ratio = server["p95_ttft_ms"] / coupled["p95_ttft_ms"]
    return f"{parts[0]}; {parts[1]} (TTFT {ratio:.2f} x coupled's). "


def shown_answers(url: str) -> list[str]:
    """A line of what some adapters make of the same prompt.  Exits where one is wrong."""
    given, found = "hello", []
    for name in SHOWN:
        body = {"model": name, "prompt": prompt_for(given), "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        text = answer.json()["choices"][0]["text"]
        if text != TASKS[name](given):
            sys.exit(f"{name} answered {text!r} to {given!r}; right is {TASKS[name](given)!r}")
        found.append(f"{name}: {prompt_for(given)} -> {text}")
    return ["Answers. " + ", ".join(found)]


def write_prompts(path: Path, rng: random.Random) -> int:
    """Demo questions with their answers, for every adapter and length; the number of adapters."""
    adapters = json.loads((HERE / "adapters" / "index.json").read_text())
    with path.open("w") as file:
        for name, about in adapters.items():
            for num_chars in range(MIN_CHARS, MAX_CHARS + 1):
                for _ in range(PROMPTS_PER_LENGTH):
                    text = sample_text(rng, num_chars)
                    row = {"adapter": name, "prompt": prompt_for(text), "answer": TASKS[about["task"]](text)}
                    file.write(json.dumps(row) + "\n")
    return len(adapters)


@contextlib.contextmanager
def serving(command: list[str], log: Path) -> Iterator[str]:
    """A server on a free port, in a session of its own so that Ctrl-C does not reach it first; its address.

    What it logs is shown only if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port)], start_new_session=True, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"{log.read_text()}the server ended with exit code {server.returncode} while starting")
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{url}/health", timeout=1).raise_for_status()
            return
        time.sleep(0.2)
    sys.exit(f"{log.read_text()}the server did not answer within {START_TIMEOUT_S:.0f} s")


def replay(
    url: str, run: Run, prompts: Path, num_adapters: int, result: Path, options: argparse.Namespace
) -> None:
    """Run the load client; it writes the run and appends to the results.  Exits where it fails."""
    command = [*MOE_LORA, "replay", "--url", url, "--trace", options.trace, "--prompts", str(prompts)]
    command += ["--seed", str(options.seed), "--label", run.label, "--num-adapters", str(num_adapters)]
    command += ["--append-result", str(Path(options.output_dir) / "results.jsonl")]
    status = subprocess.run([*command, "--save-result", str(result), "--quiet", *run.replay]).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status:
        sys.exit(status)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server (it ends its engine), by force if it does not listen; a second Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.terminate()
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
