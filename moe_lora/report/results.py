"""Result files: JSON written whole or not at all, and JSON lines {config, result, env, kind}."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from moe_lora.core.folder_lock import folder_locked

KINDS = ("measured", "simulated", "emulated")


def write_json(path: str | Path, value: Any) -> None:
    """Write the value as JSON: the file holds all of it or what it held before. NaN raises ValueError."""
    write_text(path, json.dumps(value, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. Raises ValueError naming the file if it can't be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a readable JSON file") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from None


def check_targets(**paths: str | Path | None) -> None:
    """Raise ValueError, naming the option, if these can't all be written: before work is put into them.

    Each in a folder that exists, none a folder, and no two the same file.  None: not asked for.
    """
    names: dict[Path, str] = {}
    for name, given in paths.items():
        if given is None:
            continue
        path = Path(given).resolve()
        if path.is_dir():
            raise ValueError(f"--{name}={given} is a folder; give a file")
        if not path.parent.is_dir():
            raise ValueError(
                f"--{name}={given}: there is no folder {path.parent}; make it, or write elsewhere"
            )
        if path in names:
            raise ValueError(f"--{names[path]} and --{name} are the same file, {given}; give two")
        names[path] = name


def write_text(path: str | Path, text: str) -> None:
    """Write the file whole or leave it as it was; missing folders are made.

    Through a link the file that it names is replaced; a device or pipe is written to.
    """
    path = Path(path)
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
    """Append one record as a line; a reader sees the old file or the new, and two writers lose nothing.

    kind: "measured", "simulated" (no engine ran) or "emulated" (engines ran, paced to another device's
    times).  Raises ValueError for another kind and for NaN.
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
    """The records of a JSON-lines file. Raises ValueError naming the line that is none."""
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
