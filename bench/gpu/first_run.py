# SPDX-License-Identifier: Apache-2.0
"""Measurements on one Hopper GPU, in runs of less than 9 minutes each.

    python -m bench.gpu.first_run FOLDER            # in the repository root: the decisive parts
    python -m bench.gpu.first_run FOLDER more       # copies, attention, puts, host workers, quantised layers
    python -m bench.gpu.first_run FOLDER check      # build, tuning, the kernels' benchmark, smoke
    python -m bench.gpu.first_run FOLDER tests      # build, tests marked `gpu`
    python -m bench.gpu.first_run FOLDER steps      # prompts' steps, poisoned memory, LoRA
    python -m bench.gpu.first_run FOLDER served     # `moe-lora serve` under load
    python -m bench.gpu.first_run FOLDER roofline   # steps of real sizes against the device's limits
    python -m bench.gpu.first_run FOLDER tiles      # effect of each change to a launch
    python -m bench.gpu.first_run FOLDER PART...    # some parts of any run

A part is a process under a hard limit (a hanging kernel costs its limit; the part's children end with it) and
appends JSON lines to truth.jsonl; after each part all files so far are in one archive in FOLDER.  Parts are
ordered by importance.  Exit status 1 after a failed part.  Installs nothing but the C++ libraries, built in
place: by `check` anew, by other runs if missing.  Uses the working tree's wheels in .cache/wheels and
compiled kernels in .cache/triton-cache.  --quick tries the parts of whole steps on tiny models, on any
machine; --layers starts models with fewer layers.  --limit-s overrides each part's limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import moe_lora
from moe_lora.kernels.triton.configs import CONFIG_DIR, FALLBACK

from .engine_parts import attention, attention_tiles, engine, h2d
from .exchange_parts import shmem1, shmem2, shmem_rank
from .expert_parts import expert_tiles, experts, tile_rule
from .host_parts import host
from .kernel_parts import compiled, compiled_tiles, facts, gemm, sampling
from .lora_parts import lora, lora_tiles, race, race_site, site_rows, tma, vllm
from .quantised_parts import quantised
from .roofline_parts import dependent, gpt_oss, memcheck, mixtral, qwen3, tiny_steps, zipf_adapters
from .run_log import Log
from .serve_parts import serve
from .step_parts import lora_launches, prompt_steps, uninitialised

RUNS: dict[str, dict[str, int]] = {
    "first": {
        "facts": 40,
        "compiled": 70,
        "tma": 30,
        "race": 25,
        "lora": 75,
        "experts": 70,
        "sampling": 20,
        "gemm": 15,
        "engine": 85,
    },
    "more": {
        "h2d": 20,
        "attention": 45,
        "shmem1": 40,
        "shmem2": 20,
        "host": 45,
        "vllm": 60,
        "quantised": 45,
        "dependent": 85,
        "memcheck": 75,
    },
    "check": {"build": 100, "tuning": 90, "kernels": 180, "smoke": 75},
    "tests": {"build": 100, "tests": 250},
    "steps": {
        "prompt_steps": 120,
        "uninitialised": 60,
        "race_site": 40,
        "site_rows": 60,
        "lora_launches": 120,
    },
    "served": {"serve": 300},
    "tiles": {
        "compiled_tiles": 120,
        "tile_rule": 60,
        "lora_tiles": 60,
        "expert_tiles": 60,
        "attention_tiles": 30,
    },
    "roofline": {"qwen3": 120, "gpt_oss": 105, "mixtral": 80, "zipf_adapters": 125},
}
"""Parts of each run in order, with limits in seconds."""

QUICK_PARTS = {
    "roofline",
    *RUNS["roofline"],
    "dependent",
    "prompt_steps",
    "uninitialised",
    "lora_launches",
    "serve",
}
"""Parts that take --quick and --layers."""

GPU_TESTS = (
    "tests/kernels/triton",
    "tests/engine/test_cuda.py",
    "tests/engine/step/test_logit_edits.py",
    "tests/engine/adapters/test_pool_adapters.py",
    "tests/dist/deltas/test_cuda_stream.py",
    "tests/dist/transport/test_nvshmem.py",
)
"""Files with tests marked `gpu`.  Others are not collected: one import error, e.g. for missing torchao, would
end the part before any test.
"""

_PYTEST = "-m pytest -m gpu -p no:cacheprovider"
if importlib.util.find_spec("xdist") is not None:  # most of their time kernels are compiled
    _PYTEST += f" -n {min(12, os.cpu_count() or 1)}"

COMMANDS = {
    "build": "setup.py -q build_ext --inplace",
    "tuning": "-m bench.kernels.autotune_lora --budget-s 60 --state {folder}/lora_tuning.json",
    "tests": f"{_PYTEST} -v --tb=short --durations=5 --session-timeout=230 {' '.join(GPU_TESTS)}",
    "kernels": "-m bench.kernels.bench_lora_kernels --device cuda --budget-s 150 --out {folder}/lora.jsonl",
    "smoke": "-m bench.gpu.gpu_smoke --out {folder}/gpu_smoke.jsonl",
}
"""Parts that are Python commands; the rest are functions, see `PARTS`."""


def run_all(final: Path, name: str, limits_s: dict[str, int], words: Sequence[str] = ()) -> int:
    """Run each part within its limit; archives all results in name.tar.gz after each.

    words: further command line.  Returns the number of failures.
    """
    folder = Path(tempfile.mkdtemp())
    final.mkdir(parents=True, exist_ok=True)
    environment = carried(Path(".cache"), Path(tempfile.gettempdir()), os.environ)
    log = Log(folder)
    failed = 0
    for part, limit_s in limits_s.items():
        begin = time.time()
        status, text = run_part(folder, part, limit_s, environment, words)
        tail = text[-300:] if status else ""
        log("end", name=part, status=status, seconds=round(time.time() - begin, 1), tail=tail)
        failed += status != 0
        for table in CONFIG_DIR.glob("*.json"):
            if table.stem != FALLBACK:
                shutil.copy(table, folder)
        with tarfile.open(final / "part.tar.gz", "w:gz") as tar:
            tar.add(folder, "results")
        os.replace(final / "part.tar.gz", final / f"{name}.tar.gz")
    return failed


def carried(cache: Path, scratch: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of the parts: content of the folder `cache`, unpacked or copied below `scratch`.

    wheels/*.whl go on the path, for machines without a network; a wheel for another Python disables all.
    triton-cache is the kernel cache, in a copy, shared by all runs.
    """
    found = dict(environment)
    wheels = sorted((cache / "wheels").glob("*.whl"))
    if wheels and all(map(_fits, wheels)):
        site = scratch / "moe-lora-wheels"
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), found.get("PYTHONPATH"))))
    if (cache / "triton-cache").is_dir():
        kernels = scratch / "moe-lora-triton-cache"
        shutil.copytree(cache / "triton-cache", kernels, dirs_exist_ok=True)
        found.setdefault("TRITON_CACHE_DIR", str(kernels))
    return found


def _fits(wheel: Path) -> bool:
    python, abi, _ = wheel.stem.split("-")[-3:]
    if abi == "abi3" and python.startswith("cp3"):  # from this version on
        return int(python[3:]) <= sys.version_info[1]
    return "py3" in python.split(".") or python == f"cp{sys.version_info[0]}{sys.version_info[1]}"


def run_part(
    folder: Path, part: str, limit_s: float, environment: Mapping[str, str], words: Sequence[str] = ()
) -> tuple[int | str, str]:
    """Exit status ("timeout" past its limit) and output of a part, in its own session.

    Its output is streamed to part.txt.  Its session's processes end with it.
    """
    arguments = COMMANDS.get(part, f"-m bench.gpu.first_run {{folder}} {part} --here")
    command = [sys.executable, *arguments.format(folder=folder).split(), *words]
    output = folder / f"{part}.txt"
    status: int | str = "timeout"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):  # all are gone
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, output.read_text(errors="replace")


PARTS: dict[str, Callable[[Log], None]] = {
    one.__name__: one
    for one in (
        facts,
        compiled,
        compiled_tiles,
        tma,
        race,
        lora,
        lora_tiles,
        host,
        experts,
        expert_tiles,
        attention_tiles,
        sampling,
        gemm,
        quantised,
        dependent,
        engine,
        h2d,
        attention,
        shmem1,
        shmem2,
        shmem_rank,
        qwen3,
        gpt_oss,
        mixtral,
        zipf_adapters,
        memcheck,
        tiny_steps,
        vllm,
        serve,
        prompt_steps,
        uninitialised,
        race_site,
        site_rows,
        lora_launches,
        tile_rule,
    )
}

LIBRARIES = ("kernels/cpu/_cpu*.so", "dist/transport/_shm*.so")
"""Below the package; required by host workers and the LoRA Server's transport."""


def with_build(limits_s: dict[str, int], package: Path) -> dict[str, int]:
    """The parts, preceded by a build of missing C++ libraries.  package: its folder."""
    if all(any(package.glob(name)) for name in LIBRARIES):
        return limits_s
    return {"build": RUNS["check"]["build"], **limits_s}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main() -> int:
    known = {part: limit_s for run in RUNS.values() for part, limit_s in run.items()}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["first"], metavar="NAME", help="a run, or parts")
    parser.add_argument("--here", action="store_true", help="run one part in this process")
    parser.add_argument("--quick", action="store_true", help="parts of `roofline` on tiny models, anywhere")
    parser.add_argument("--layers", type=_positive, help="models of at most so many")
    parser.add_argument("--limit-s", type=_positive, help="seconds for each part, instead of its own limit")
    options = parser.parse_args()
    names = options.names
    if unknown := sorted(set(names) - {*known, *PARTS, *RUNS}):
        parser.error(f"unknown: {unknown}; runs are {[*RUNS]}, parts {[*known]}")
    words = ["--quick"] * options.quick + (["--layers", str(options.layers)] if options.layers else [])
    if words and (others := sorted(set(names) - QUICK_PARTS)):
        parser.error(f"{words[0]} is for {', '.join(sorted(QUICK_PARTS))}, not for {others}")
    if options.here:
        PARTS[names[0]](Log(options.folder, quick=options.quick, max_layers=options.layers))
        return 0
    limits_s: dict[str, int] = {}
    for name in names:
        limits_s |= RUNS.get(name) or {name: known[name]}
    limits_s = with_build(limits_s, Path(moe_lora.__file__).parent)
    if options.limit_s:
        limits_s = dict.fromkeys(limits_s, options.limit_s)
    return int(run_all(options.folder, "-".join(names), limits_s, words) > 0)


if __name__ == "__main__":
    sys.exit(main())
