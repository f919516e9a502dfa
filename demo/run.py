"""`make demo`: serve the demo model with a LoRA Server, then without, and compare; leaves nothing behind.

Both get the same arrivals, so that the report shows them side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from .tasks import MAX_CHARS, MIN_CHARS, TASKS, prompt_for, sample_text

HERE = Path(__file__).parent
START_TIMEOUT_S = 120.0
PROMPTS_PER_LENGTH = 24
MOE_LORA = [sys.executable, "-m", "moe_lora.cli.main"]
SYSTEMS = {"LoRA Server": ["--lora-server", "EP1-PP1"], "coupled": []}
"""What is served, and the options of `moe-lora serve` that make the difference."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default=str(HERE / "trace.csv"), help="trace file (azure, burstgpt, ...)")
    parser.add_argument("--duration-s", default="45", help="send what arrives in this time, to each system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default=str(HERE), help="where report.html and results.jsonl go")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        num_adapters = write_prompts(prompts, random.Random(options.seed))
        runs: list[Path] = []
        for label, arguments in SYSTEMS.items():
            run = Path(scratch) / f"{len(runs)}.json"
            status = measure(label, arguments, prompts, num_adapters, run, options)
            runs += [run] if run.exists() else []
            if status:
                break
        if runs:
            report = Path(options.output_dir) / "report.html"
            subprocess.run([*MOE_LORA, "report", *map(str, runs), "--out", str(report)], check=True)
        return status


def measure(
    label: str,
    arguments: list[str],
    prompts: Path,
    num_adapters: int,
    run: Path,
    options: argparse.Namespace,
) -> int:
    """Serve with these options, send the load, write the run; the load client's exit status."""
    server, url = start_server(arguments)
    try:
        wait_until_ready(server, url)
        return replay(url, label, prompts, num_adapters, run, options)
    except KeyboardInterrupt:
        return 130
    finally:
        stop(server)


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


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """`moe-lora serve` on a free port, in a session of its own so that Ctrl-C does not reach it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*MOE_LORA, "serve", str(HERE / "model"), "--lora-dir", str(HERE / "adapters")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", "1", *arguments]
    print("starting the server:", "moe-lora", *command[3:], flush=True)
    return subprocess.Popen(command, start_new_session=True), f"http://127.0.0.1:{port}"


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(
                f"the server ended with exit code {server.returncode} while starting; see its messages above"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"the server did not answer within {START_TIMEOUT_S:.0f} s")


def replay(
    url: str, label: str, prompts: Path, num_adapters: int, run: Path, options: argparse.Namespace
) -> int:
    """Run the load client; it prints the table, writes the run and appends to the results."""
    output = Path(options.output_dir)
    command = [*MOE_LORA, "replay", "--url", url, "--trace", options.trace, "--prompts", str(prompts)]
    command += [
        "--duration-s",
        options.duration_s,
        "--busiest",
        "--seed",
        str(options.seed),
        "--label",
        label,
    ]
    command += ["--append-result", str(output / "results.jsonl"), "--save-result", str(run)]
    client = subprocess.Popen([*command, "--num-adapters", str(num_adapters)])
    try:
        return client.wait()
    except KeyboardInterrupt:
        return client.wait()
    finally:
        if client.poll() is None:
            client.terminate()
            client.wait()


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
