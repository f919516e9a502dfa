# SPDX-License-Identifier: Apache-2.0
"""The functions and files on a request's way, in the processes of a server.

A server of the demo answers the same request many times, each time in a separate window.  A function counts
if half of the windows hold the function, beyond the calls of an idle server in the same time.  Neither a
heartbeat nor a slow machine changes the numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .house_recorder import FOLDER, TREE, WINDOW_FILE

IDLE_S, REST_S = 8.0, 3.0
SETTLE_S = 0.15
"""After an answer, for the rest of the work."""
PAUSES_S = tuple(0.15 + 0.5 * (number * 0.618034 % 1) for number in range(24))
"""Between windows: longer than the engine's period of 0.1 s, and out of step with a timer of 0.5 s."""
NUM_WINDOWS = {"completion": 24, "load": 12, "first_completion": 12}
SPARE = 1.25
"""A busy server's rate of calls without requests, at most, as a multiple of the idle server's rate."""
PERIOD_S = 2.0
"""The longest mean time between two calls of a function in an idle server's count."""
CAPTURED = """
from moe_lora.models import compiled_layers

compiled_layers.lookup_backend = lambda name: lambda graph, inputs: graph
"""
"""A process's compiled layers run the compiler's graphs, without generated code."""
SERVE = ("-m", "moe_lora.cli.main", "serve", "demo/model", "--lora-dir", "demo/adapters")
TRACE_METHOD = (
    f"`{' '.join(SERVE[2:])}` with its defaults (one instance, compiled), over HTTP.  Every process counts "
    "the calls of each Python function of moe_lora and cli, in each thread (sys.setprofile); a coroutine or "
    "generator that continues counts as a call.  Functions, methods, nested functions and lambdas count, "
    "comprehensions do not; a function that two processes call counts once.  completion: POST "
    "/v1/completions, 3 tokens, greedy, for a loaded adapter and a known prompt.  load: POST "
    "/v1/load_lora_adapter under a new name, each time with other weights.  first_completion: a completion "
    f"for such an adapter.  {', '.join(f'{name} {number}' for name, number in NUM_WINDOWS.items())} times; a "
    f"window ends {SETTLE_S} s after the answer, the next one opens {min(PAUSES_S)} to {max(PAUSES_S):.2f} s "
    "later, and the shorter half of the windows is kept.  A function counts if half of these windows hold "
    "it.  An idle server's function also needs a caller that the idle server lacks, or half a call per "
    f"window beyond {SPARE} times the idle server's rate.  idle: functions that an idle server calls at "
    f"least every {PERIOD_S:g} s, in {IDLE_S:g} s."
)

Function = tuple[str, str]
"""File and name."""
Calls = dict[str, dict[Function, Counter[str]]]
"""Process, then function, then caller: number of calls."""


@dataclass(frozen=True)
class Windows:
    """A record: calls and seconds by the number of the window, own modules by process."""

    calls: dict[int, Calls]
    seconds: dict[int, float]
    modules: dict[str, set[str]]


def trace_requests(
    tree: Path, python: str, *, generate_code: bool = True, kinds: Collection[str] = NUM_WINDOWS
) -> dict[str, Any]:
    """Start a server of the tree, send the requests, and count the functions of each kind of window.

    generate_code: False runs the graphs of compiled layers: the same functions of the tree, in half of the
    time.
    kinds: of windows beside the idle one.
    """
    import httpx

    tree = tree.resolve()
    with (
        tempfile.TemporaryDirectory() as name,
        _server(tree, python, Path(name), generate_code) as (url, server),
    ):
        folder = Path(name)
        with httpx.Client(base_url=url, timeout=600) as http:
            _wait_ready(http, server, folder / "log")
            numbers, seconds = _send_all(http, tree, folder, kinds)
        calls, modules = _read(folder)
        windows = Windows(calls, seconds, modules)
    return {
        "command": " ".join(SERVE),
        "windows": {kind: entered(windows, numbers["idle"], numbers[kind]) for kind in numbers},
        "modules": {process: sorted(names) for process, names in sorted(modules.items())},
    }


@contextmanager
def _server(
    tree: Path, python: str, folder: Path, generate_code: bool
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    (folder / WINDOW_FILE).write_bytes(b"\0")
    recorder = Path(__file__).with_name("house_recorder.py").resolve()
    text = f"import runpy, sys\nrunpy.run_path({str(recorder)!r}, run_name='house_recorder')['record']()\n"
    if not generate_code:
        text += "if 'run_role' in ' '.join(sys.orig_argv):\n" + textwrap.indent(CAPTURED, "    ")
    (folder / "sitecustomize.py").write_text(text)
    paths = [str(folder), str(tree), os.environ.get("PYTHONPATH", "")]
    variables = {FOLDER: str(folder), TREE: str(tree), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [python, *SERVE, "--port", str(port)],
            cwd=tree,
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        server.wait(120)


def _wait_ready(http: Any, server: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    while server.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server ended: {log.read_text(errors='replace')[-2000:]}")


def _send_all(
    http: Any, tree: Path, folder: Path, kinds: Collection[str]
) -> tuple[dict[str, list[int]], dict[int, float]]:
    """The numbers of the windows by kind, and the seconds of each window."""

    def complete(model: str) -> None:
        body = {"model": model, "prompt": "abc:", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3, answer.text

    def load(name: str) -> None:
        body = {"lora_name": name, "lora_path": str(folder / name)}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text

    names = [f"loaded-{number}" for number in range(1, NUM_WINDOWS["load"] + 1)]
    for change, name in enumerate(names, start=1):
        _copy_changed(tree / "demo/adapters/reverse", folder / name, change)
    for _ in range(5):
        complete("rot13")
    _signal_all(folder, signal.SIGUSR1)
    for _ in range(5):
        complete("rot13")
    time.sleep(REST_S)
    calls: dict[str, list[Callable[[], None]]] = {
        "idle": [lambda: time.sleep(IDLE_S)],
        "completion": [lambda: complete("rot13")] * NUM_WINDOWS["completion"],
        "load": [lambda name=name: load(name) for name in names],  # type: ignore[misc]
        "first_completion": [lambda name=name: complete(name) for name in names],  # type: ignore[misc]
    }
    sent = {kind: calls[kind] for kind in ("idle", *kinds)}
    numbers, seconds = _open_windows(sent, folder / WINDOW_FILE)
    _signal_all(folder, signal.SIGUSR2)
    return numbers, seconds


def _open_windows(
    kinds: dict[str, list[Callable[[], None]]], path: Path
) -> tuple[dict[str, list[int]], dict[int, float]]:
    numbers: dict[str, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    with path.open("r+b", buffering=0) as file:
        for kind, calls in kinds.items():
            for call in calls:
                number = len(seconds) + 1
                time.sleep(PAUSES_S[number % len(PAUSES_S)])
                numbers[kind].append(number)
                start = time.monotonic()
                os.pwrite(file.fileno(), bytes([number]), 0)
                call()
                time.sleep(SETTLE_S)
                os.pwrite(file.fileno(), b"\0", 0)
                seconds[number] = time.monotonic() - start
    return dict(numbers), seconds


def _copy_changed(source: Path, target: Path, change: int) -> None:
    """A copy of the adapter with a change in the lowest bits of a weight."""
    shutil.copytree(source, target)
    path = target / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= change
    path.write_bytes(content)


def _signal_all(folder: Path, number: int) -> None:
    """Signal the server's processes, and wait for the file of each process."""
    for path in folder.glob("*.json"):
        path.unlink()
    waiting = set()
    for path in folder.glob("*.pid"):
        if b"moe_lora" in _command(path.stem):
            os.kill(int(path.stem), number)
            waiting.add(path.stem)
    assert waiting, "no process of the server records"
    while waiting := {pid for pid in waiting if _command(pid) and not (folder / f"{pid}.json").exists()}:
        time.sleep(0.05)


def _command(pid: str) -> bytes:
    """The command of a process; empty after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _read(folder: Path) -> tuple[dict[int, Calls], dict[str, set[str]]]:
    calls: dict[int, Calls] = defaultdict(lambda: defaultdict(lambda: defaultdict(Counter)))
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        process = "engine" if "run_role" in found["command"] else "front end"
        modules[process].update(found["modules"])
        for window, file, name, caller, number in found["calls"]:
            calls[window][process][file, name][caller] += number
    return calls, modules


def entered(windows: Windows, idle: list[int], like: list[int]) -> dict[str, Any]:
    """Files and functions in the windows of a kind, together and by process."""
    if like == idle:
        entered = {
            process: {function for function, calls in found.items() if calls.total() * PERIOD_S >= IDLE_S}
            for process, found in windows.calls[idle[0]].items()
        }
    else:
        entered = {process: _caused(windows, process, idle[0], like) for process in windows.modules}
    functions = set().union(*entered.values())
    return {
        **_numbers(functions),
        "processes": {process: _numbers(found) for process, found in sorted(entered.items()) if found},
        "functions": sorted(f"{file}:{name}" for file, name in functions),
    }


def _caused(windows: Windows, process: str, idle: int, like: list[int]) -> set[Function]:
    """Functions in a process because of requests, by the shorter half of like windows."""
    like = sorted(like, key=windows.seconds.__getitem__)[: (len(like) + 1) // 2]
    share = SPARE * sum(windows.seconds[number] for number in like) / windows.seconds[idle]
    by_itself = windows.calls[idle][process]
    held: Counter[Function] = Counter()
    calls: Counter[Function] = Counter()
    held_by_new_caller: Counter[Function] = Counter()
    for number in like:
        for function, callers in windows.calls[number][process].items():
            held[function] += 1
            calls[function] += callers.total()
            held_by_new_caller[function] += bool(callers.keys() - by_itself.get(function, {}).keys())
    half = len(like) / 2

    def is_caused(function: Function) -> bool:
        spare = share * sum(by_itself.get(function, {}).values())
        return held_by_new_caller[function] >= half or calls[function] >= half + spare

    return {function for function in held if held[function] >= half and is_caused(function)}


def _numbers(functions: Iterable[Function]) -> dict[str, int]:
    functions = set(functions)
    return {"num_files": len({file for file, _ in functions}), "num_functions": len(functions)}
