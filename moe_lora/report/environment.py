"""The machine and software a number was measured on. Nothing that names the machine or its user."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("moe-lora", "torch", "triton", "transformers", "peft", "numpy", "httpx")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


def environment() -> dict[str, Any]:
    """CPU, cores, memory, GPUs, versions of Python and packages, git commit; null where unknown."""
    fields = _cpuinfo()
    features = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "cpu_model": fields.get("model name") or platform.processor() or None,
        "cpu_features": [feature for feature in _CPU_FEATURES if feature in features],
        "cpu_cores": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "os": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "threads": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        **git_state(Path(__file__).resolve().parent),
    }


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():  # not Linux
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> list[str]:
    # The driver's own files, as asking torch would import it.
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                found.append(line.partition(":")[2].strip())
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(folder: Path, *, without: Path | None = None) -> dict[str, Any]:
    """git_commit and whether tracked files differ from it (git_dirty); both None outside a repository.

    without: a folder below `folder` whose files don't count.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    paths = () if without is None else ("--", ".", f":(exclude){without.relative_to(folder)}")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", *paths) if commit else None
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
