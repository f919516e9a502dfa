# SPDX-License-Identifier: Apache-2.0
"""Writes and reads of a registry with 40 000 adapters, against bare files and bare SQLite.

    python -m bench.cluster.bench_registry --out bench/results/registry.jsonl

Expected before the first run (reasons: README.md): 140 adds/s, constant over the run; a lookup in 20 us, the
whole list in 0.5 s, a page of 1000 in 13 ms, a resolve of such small files in 0.2 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench.harness.interleave import Contestant, interleave, ratio, repeated
from bench.harness.records import Recorder
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.registry.registry import Registry

NUM_ADAPTERS = 40_000
NUM_ROUNDS = 9
BASE = "0" * 64
EXPECTED = {"adds_per_s": 140, "get_s": 20e-6, "list_s": 0.5, "page_s": 13e-3, "resolve_s": 0.2e-3}
_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


class Adds:
    """`Registry.add` of new adapters with different content, in sequence."""

    def __init__(self, registry: Registry, folder: Path) -> None:
        self.registry, self.folder, self.num_added = registry, folder, 0
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(_CONFIG))

    def __call__(self, num_steps: int) -> float:
        taken = 0.0
        for _ in range(num_steps):
            weights = np.full((2, 64), self.num_added, dtype=np.float32)
            save_file({"base_model.model.q_proj.lora_A.weight": weights}, self.folder / WEIGHTS_FILE)
            begin = time.perf_counter()
            self.registry.add(f"adapter-{self.num_added}", self.folder, base_hash=BASE)
            taken += time.perf_counter() - begin
            self.num_added += 1
        return taken


def bare_adds(folder: Path) -> Contestant:
    """The least equally durable work: three small files, their folder and its parent synced, one commit."""
    folder.mkdir()
    database = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE bare (name TEXT PRIMARY KEY, row TEXT) WITHOUT ROWID")
    numbers = itertools.count()

    def add() -> None:
        number = str(next(numbers))
        place = folder / number
        place.mkdir()
        for name in "abc":
            with (place / name).open("wb") as file:
                file.write(b"x" * 600)
                file.flush()
                os.fsync(file.fileno())
        for synced in (place, folder):
            handle = os.open(synced, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        database.execute("INSERT INTO bare VALUES (?, ?)", (number, "x" * 400))

    return repeated(add)


def compared(own: Contestant, bare: Contestant, num_steps: int) -> dict[str, Any]:
    """Seconds a step of both in turn, and the ratio."""
    times = interleave(
        {"own": (own, num_steps, NUM_ROUNDS), "bare": (bare, num_steps, NUM_ROUNDS)}, NUM_ROUNDS
    )
    return {
        "own_s": float(np.median(times["own"])),
        "bare_s": float(np.median(times["bare"])),
        "own_over_bare": ratio(times["own"], times["bare"]),
    }


def measure(num_adapters: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Results by operation: add (first and last), get, resolve, page, list, open."""
    results: dict[str, dict[str, Any]] = {}
    num_steps = max(1, num_adapters // (20 * NUM_ROUNDS))
    with Registry(folder / "registry", create=True) as registry:
        adds, bare = Adds(registry, folder / "source"), bare_adds(folder / "bare")
        results["add, first"] = compared(adds, bare, num_steps)
        between = num_adapters - 2 * adds.num_added
        results["add, between"] = {"own_s": adds(between) / between}
        results["add, last"] = compared(adds, bare, num_steps)
        rng = random.Random(0)
        database = sqlite3.connect(registry.folder / "registry.sqlite")

        def name() -> str:
            return f"adapter-{rng.randrange(adds.num_added)}"

        def bare_get() -> None:
            database.execute("SELECT * FROM adapters WHERE name = ?", (name(),)).fetchall()

        results["get"] = compared(repeated(lambda: registry.get(name())), repeated(bare_get), 1000)
        results["resolve"] = compared(
            repeated(lambda: registry.resolve(name(), BASE)),
            repeated(lambda: Path(registry.get(name()).path, WEIGHTS_FILE).read_bytes()),
            100,
        )
        bare_list = repeated(lambda: database.execute("SELECT * FROM adapters ORDER BY name").fetchall())
        results["list"] = compared(repeated(registry.adapters), bare_list, 1)
        page = "SELECT * FROM adapters WHERE name > ? ORDER BY name LIMIT 1000"
        results["page"] = compared(
            repeated(lambda: registry.adapters(after=name(), limit=1000)),
            repeated(lambda: database.execute(page, (name(),)).fetchall()),
            5,
        )
        results["list"]["num_listed"] = len(registry.adapters())
        database.close()
    begin = time.perf_counter()
    Registry(folder / "registry").close()
    results["open"] = {"own_s": time.perf_counter() - begin}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--num-adapters", type=int, default=NUM_ADAPTERS)
    arguments = parser.parse_args()
    print("expected", json.dumps(EXPECTED))
    record = Recorder(arguments.out)
    # Removing the files takes about as long as adding, so results are written before.
    with tempfile.TemporaryDirectory() as folder:
        for what, result in measure(arguments.num_adapters, Path(folder)).items():
            record({"bench": "registry", "what": what, "num_adapters": arguments.num_adapters}, result)
            print(
                f"{what:<13} {1e3 * result['own_s']:.3f} ms",
                json.dumps(result.get("own_over_bare")),
                flush=True,
            )


if __name__ == "__main__":
    main()
