# SPDX-License-Identifier: Apache-2.0
"""Nothing that a frame from another host reaches can name code to run."""

from __future__ import annotations

import ast
from pathlib import Path

import moe_lora

ROOT = Path(moe_lora.__file__).parent
UNSAFE = ("pickle", "cloudpickle", "marshal", "shelve", "dill", "multiprocessing.connection")
WORDS = (*UNSAFE, "eval", "exec", "yaml", "torch")
"""Each has one of them that may be found; a whole parse takes seconds."""
WITHIN_ONE_INSTANCE = {
    "engine/ranks/followers.py",
    "engine/ranks/follower.py",
    "engine/step/step_batch.py",
    "core/processes.py",
    "dist/host_workers/worker.py",
    "dist/host_workers/worker_link.py",
}
"""Rank 0, its followers and their host workers: processes of one user and host, over socket pairs or a socket
that only that user enters, which no link of `dist.net` leads to."""


def unsafe_parts(path: Path) -> list[str]:
    """Modules that a file imports, and calls it makes, by which bytes become code."""
    found, text = [], path.read_text(encoding="utf-8")
    if not any(word in text for word in WORDS):
        return found
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(
                one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords
            )
            if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load") or (
                called == "torch.load" and not safe
            ):
                found.append(called)
        found += [name for name in names if name in UNSAFE or name.split(".")[0] in UNSAFE]
    return found


def test_only_the_ranks_of_one_instance_exchange_pickles():
    found = {
        str(path.relative_to(ROOT)): parts
        for path in sorted(ROOT.rglob("*.py"))
        if (parts := unsafe_parts(path))
    }
    assert set(found) <= WITHIN_ONE_INSTANCE, found


def test_links_do_not_know_what_the_ranks_exchange():
    imports = {"followers", "follower", "runner", "step_batch"}
    links = [
        *(ROOT / "dist" / "net").glob("*.py"),
        *(ROOT / "dist" / "cluster").rglob("*.py"),
        *(ROOT / "dist" / "lora_server").rglob("*.py"),
        *(ROOT / "engine" / "client" / f"{name}.py" for name in ("messages", "client")),
    ]
    for path in links:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.module.rpartition(".")[2] not in imports, path
