"""What a request enters: every function of moe_lora that is called, in all processes of a server, per window.

The upper half runs inside each of these processes and needs the standard library only: `record` is called by
a sitecustomize module that the driver below puts on PYTHONPATH.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WINDOWS = ("idle", "completion", "load", "first_completion")
SETTLE_S, IDLE_S = 0.3, 2.0
_FOLDER, _TREE = "HOUSE_TRACE_FOLDER", "HOUSE_TRACE_TREE"
TRACE_METHOD = (
    "`moe-lora serve demo/model --lora-dir demo/adapters` with its defaults (one instance, compiled), "
    "spoken to over HTTP.  Every process of it sets sys.setprofile and threading.setprofile before "
    "anything else runs, so every Python function that is called, and every coroutine or generator that "
    "goes on, in any thread is seen; kept are those between a window's begin and end (a byte in a "
    f"shared file).  A window ends {SETTLE_S} s after the answer.  Counted are named functions and "
    "lambdas (no comprehensions) in files of moe_lora and cli, a function once however often it ran, "
    "and once if in two processes.  completion: POST /v1/completions, 3 tokens, greedy, for an adapter "
    "that answered the same call three times before.  load: POST /v1/load_lora_adapter of a folder "
    "under a name not known before.  first_completion: as completion, for that adapter, once.  idle: "
    f"{IDLE_S} s without a call, after 3 s of rest; what it shares with a window may be background."
)


def record() -> None:
    """Note, from now on, each function of the tree that this process enters while a window is open."""
    folder, tree = os.environ[_FOLDER], os.environ[_TREE]
    with open(os.path.join(folder, "window"), "rb") as file:
        window = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    seen: set[tuple[int, CodeType]] = set()
    counted = (os.path.join(tree, "moe_lora", ""), os.path.join(tree, "cli", ""))

    def note(frame: FrameType, event: str, argument: Any) -> None:
        now = window[0]
        if not now or event != "call":
            return
        code = frame.f_code
        if (now, code) in seen:
            return
        seen.add((now, code))
        path = code.co_filename
        if not path.startswith(counted):
            return
        name = code.co_qualname  # type: ignore[attr-defined]  # Python 3.11 or later
        line = {"window": now, "file": os.path.relpath(path, tree), "name": name, "command": _command()}
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    os.register_at_fork(after_in_child=seen.clear)
    threading.setprofile(note)
    sys.setprofile(note)


def _command() -> str:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace").strip()


# ---- the driver


def trace_requests(tree: Path, python: str) -> dict[str, Any]:
    """Start a server of the tree, send it the requests, and count what each window entered."""
    import httpx

    tree = tree.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "window").write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(
            "import runpy\n"
            f"runpy.run_path({str(Path(__file__).resolve())!r}, run_name='house_trace')['record']()\n"
        )
        command = [
            python,
            "-m",
            "moe_lora.cli.main",
            "serve",
            "demo/model",
            "--lora-dir",
            "demo/adapters",
            "--port",
        ]
        port = _free_port()
        paths = [name, str(tree), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            _FOLDER: name,
            _TREE: str(tree),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [*command, str(port)], cwd=tree, env=environment, stdout=log, stderr=log
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
                _wait_ready(http, server, folder / "log")
                _send_all(http, tree, folder / "window")
        finally:
            server.terminate()
            server.wait(60)
        return {"command": " ".join(command[1:-1]), "windows": _windows(folder)}


def _send_all(http: Any, tree: Path, window: Path) -> None:
    def complete(model: str) -> None:
        body = {"model": model, "prompt": "abc:", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3, answer.text

    def load() -> None:
        body = {"lora_name": "loaded-now", "lora_path": str(tree / "demo/adapters/reverse")}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text

    for _ in range(3):
        complete("rot13")
    time.sleep(3)
    calls: dict[str, Callable[[], None]] = {
        "idle": lambda: time.sleep(IDLE_S),
        "completion": lambda: complete("rot13"),
        "load": load,
        "first_completion": lambda: complete("loaded-now"),
    }
    for number, name in enumerate(WINDOWS, start=1):
        _set(window, number)
        calls[name]()
        time.sleep(SETTLE_S)
        _set(window, 0)
        time.sleep(SETTLE_S)


def _set(window: Path, number: int) -> None:
    with window.open("r+b") as file:
        file.write(bytes([number]))


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


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _windows(folder: Path) -> dict[str, Any]:
    """Per window: files and functions of all processes together, of each, and those not seen while idle."""
    entered: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in WINDOWS}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            inner = one["name"].rpartition(".")[2]
            if inner.startswith("<") and inner != "<lambda>":
                continue
            process = "front end" if "moe_lora.cli.main" in one["command"] else "engine"
            entered[WINDOWS[one["window"] - 1]][process].add(f"{one['file']}:{one['name']}")
    idle = set().union(*entered["idle"].values())
    found = {}
    for name, processes in entered.items():
        functions = set().union(*processes.values())
        found[name] = {
            **_numbers(functions),
            "num_files_not_idle": len(_files(functions - idle)),
            "num_functions_not_idle": len(functions - idle),
            "processes": {process: _numbers(ones) for process, ones in sorted(processes.items())},
            "functions": sorted(functions),
            "also_idle": sorted(functions & idle),
        }
    return found


def _files(functions: set[str]) -> set[str]:
    return {one.partition(":")[0] for one in functions}


def _numbers(functions: set[str]) -> dict[str, int]:
    return {"num_files": len(_files(functions)), "num_functions": len(functions)}
