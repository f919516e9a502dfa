# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON, and JSON lines {config, result, env, kind}."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_lora.core.host import cpu_info, cpu_model, folder_locked

KINDS = ("measured", "simulated", "emulated")


def write_json(path: str | Path, value: Any) -> None:
    """Write the value atomically.  Raises ValueError for NaN."""
    write_text(path, json.dumps(value, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file.  Raises ValueError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a readable JSON file") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def check_targets(inputs: Iterable[str | Path | None] = (), **paths: str | Path | None) -> None:
    """Raises ValueError with the option unless these files can all be written; makes missing folders.

    inputs: files to read; none may be written.
    """
    read = [Path(one) for one in inputs if one is not None]
    names: dict[Path, str] = {}
    for key, given in paths.items():
        if given is None:
            continue
        name = key.replace("_", "-")
        path = Path(given).resolve()
        if path.is_dir():
            raise ValueError(f"--{name}={given} is a folder; give a file")
        if path.is_file() or not path.exists():
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
            folder = path.parent
            if not (folder.is_dir() and os.access(folder, os.W_OK)):
                what = (
                    "the folder {} can't be written"
                    if folder.is_dir()
                    else "there is no folder {} to write to"
                )
                raise ValueError(f"--{name}={given}: {what.format(folder)}; write elsewhere")
        if path.is_file() and any(one.is_file() and one.samefile(path) for one in read):
            raise ValueError(f"--{name}={given} is a file to read too; write to another")
        if path in names:
            raise ValueError(f"--{names[path]} and --{name} are the same file, {given}; give two")
        names[path] = name


def write_text(path: str | Path, text: str) -> None:
    """Write the file atomically; makes missing folders.

    Follows links; writes to devices and pipes directly.
    """
    try:
        _write_text(Path(path), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_text(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def append_result(
    path: str | Path, *, config: dict[str, Any], result: dict[str, Any], env: dict[str, Any], kind: str
) -> None:
    """Append one record atomically, also with several writers.

    kind: "measured", "simulated" (no engine) or "emulated" (engines paced to another device).  Raises
    ValueError for another kind and for NaN.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    record = {"kind": kind, "config": config, "result": result, "env": env}
    line = json.dumps(record, allow_nan=False) + "\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder_locked(target.parent):
        before = target.read_text(encoding="utf-8") if target.exists() else ""
        write_text(target, before + ("\n" if before and not before.endswith("\n") else "") + line)


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file.  Raises ValueError with a bad line."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not {"config", "result", "env", "kind"} <= set(record):
            raise ValueError(f"{path}, line {number}: needed keys: kind, config, result, env")
        records.append(record)
    return records


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_PACKAGES = ("moe-lora", "torch", "triton", "transformers", "peft", "numpy", "httpx")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


def environment() -> dict[str, Any]:
    """CPU, memory, GPUs, versions, git commit; null if unknown.  Nothing identifies machine or user."""
    fields = cpu_info()
    features = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "cpu_model": cpu_model(),
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


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> list[str]:
    # The driver's files: no import of torch.
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
    """git_commit, and git_dirty: tracked files differ; both None outside a repository."""
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
