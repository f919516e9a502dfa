# SPDX-License-Identifier: Apache-2.0
"""The emulated device of `bench_host_assisted`, scaled to one host worker's speed."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.harness.random_model import ATTENTION, write_adapter, write_model
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.deltas.session import FrameLayout
from moe_lora.dist.host_workers.profile import host_section
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.engine.ranks.host_settings import machine_of, model_of
from moe_lora.families import shape_of
from moe_lora.kernels.operands import StepTables
from moe_lora.lora.backend import AddTo
from moe_lora.lora.row_routing import RoutedAdapter, RowRouting, Source, content_number, no_terms
from moe_lora.timing.host_times import HostTimes, PartTime
from moe_lora.timing.layer_stages import prefill_shares

from .assisted_plan import DECODE_SHARE, LONGEST, Cell

_NUM_TIMES = 31


class Files:
    """Models and adapters in a folder, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[object, Path] = {}
        self._adapters: dict[object, list[Path]] = {}

    def model(self, cell: Cell) -> Path:
        known = self._models.get(cell.size)
        if known is None:
            known = self._models[cell.size] = write_model(
                self._folder / f"model{len(self._models)}", cell.size
            )
        return known

    def adapters(self, cell: Cell) -> list[Path]:
        """On q, k and v as in the paper, or on all sites."""
        key = (cell.size, cell.lora_rank, cell.all_sites)
        known = self._adapters.setdefault(key, [])
        place = f"adapters{list(self._adapters).index(key)}"
        for seed in range(len(known), cell.num_adapters):
            modules = ATTENTION if cell.all_sites else ("q_proj", "k_proj", "v_proj")
            known.append(
                write_adapter(
                    self._folder / place / str(seed),
                    cell.size,
                    self.model(cell),
                    cell.lora_rank,
                    experts=cell.all_sites,
                    seed=seed,
                    attention=modules,
                )
            )
        return known[: cell.num_adapters]


@dataclass(frozen=True)
class Device:
    """profile: of a layer's stages.  host_s: {prompt tokens: a worker's seconds for the sites of a layer}.
    performance_model: a file of these times, for the engines' decisions.
    """

    profile: StepProfile
    num_layers: int
    adapter_bytes: int
    host_s: dict[int, float]
    performance_model: Path

    def prefill_s(self, num_tokens: int) -> float:
        """A whole prompt's."""
        return self.num_layers * self.profile.prefill.seconds(num_tokens)


def scaled_device(cell: Cell, model_dir: Path, adapter: Path, core: int, slack: float) -> Device:
    """A device with `slack` times the worker's time per site and prompt: c, a mean prompt, then needs one
    worker.  A layer's time is a + b tokens, as the worker's.
    """
    shape = shape_of(read_config(model_dir))
    packed = read_adapter(adapter, shape, torch.bfloat16)
    shares = prefill_shares(shape)
    lengths = [cell.mean_prompt // LONGEST, cell.mean_prompt, LONGEST * cell.mean_prompt]
    times = host_times(shape, packed, lengths, cell.mean_prompt, core)
    fixed_s = per_token_s = 0.0
    for site, of_site in times.items():
        rise = (of_site[-1] - of_site[0]) / (lengths[-1] - lengths[0])
        start_s = max(seconds - rise * n for n, seconds in zip(lengths, of_site, strict=True))
        fixed_s = max(fixed_s, slack / shares[site] * start_s)
        per_token_s = max(per_token_s, slack / shares[site] * rise)
    prefill = StageTime(fixed_s=fixed_s, per_row_s=per_token_s)
    profile = StepProfile(
        attention=StageTime(fixed_s=DECODE_SHARE * prefill.seconds(cell.mean_prompt)), prefill=prefill
    )
    host_s = {n: sum(of_site[i] for of_site in times.values()) for i, n in enumerate(lengths)}
    path = model_dir / f"times-{cell.lora_rank}-{cell.mean_prompt}.json"
    write_times(path, shape, packed, {site: of_site[:2] for site, of_site in times.items()}, lengths)
    return Device(profile, shape.num_layers, packed.nbytes, host_s, path)


def write_times(
    path: Path,
    shape: ModelShape,
    packed: PackedAdapter,
    times: Mapping[int, Sequence[float]],
    lengths: Sequence[int],
) -> None:
    """The worker's file of `moe-lora profile-steps --host-worker`, with emulated
    times of device and loads.
    """
    worker = {}
    for site, (short_s, mean_s) in times.items():
        rise = max(0.0, (mean_s - short_s) / (lengths[1] - lengths[0]))
        start = PartTime(fixed_s=max(0.0, mean_s - rise * lengths[1]), per_token_s=rise)
        worker["+".join(shape.sites[site].modules)] = start
    found = HostTimes(
        worker=worker,
        device=PartTime(),
        num_layers=shape.num_layers,
        load_fixed_s=0.0,
        load_bytes_per_s=1e12,
        bytes_per_rank=packed.nbytes / packed.max_lora_rank,
        max_tokens=lengths[-1],
        max_rank=packed.max_lora_rank,
    )
    machine, model = machine_of(torch.device("cpu")), model_of(shape, torch.bfloat16)
    path.write_text(json.dumps({"host": host_section(found, machine, model, {}, [])}))


def host_times(
    shape: ModelShape, packed: PackedAdapter, lengths: Sequence[int], tokens_per_worker: int, core: int
) -> dict[int, list[float]]:
    """Seconds from `begin` to the deltas' being added, by site with deltas and length; medians."""
    top_k = max(1, shape.num_experts_per_token)
    layout = FrameLayout(shape, torch.bfloat16, tokens_per_worker * top_k)
    found: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = HostStore(folder)
        store.put(packed)
        workers = HostWorkers(layout, store, 1, tokens_per_worker, cores=[core])
        try:
            for number, site in enumerate(shape.sites):
                if not set(packed.targets).isdisjoint(site.modules):
                    found[number] = [_host_time(workers, shape, packed, number, n) for n in lengths]
            assert not workers.backend.num_fallback_rows, "a worker did not answer in time"
        finally:
            workers.close()
    return found


def _host_time(
    workers: HostWorkers, shape: ModelShape, packed: PackedAdapter, site: int, num_tokens: int
) -> float:
    begin = begun_at(workers, shape, packed, num_tokens)
    x, y, ids = operands(shape, site, num_tokens)
    times = []
    for number in range(_NUM_TIMES):
        begin_s = time.perf_counter()
        add_to = begin(number % shape.num_layers, site, x, ids)
        assert add_to is not None
        add_to(y)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


def begun_at(
    workers: HostWorkers, shape: ModelShape, packed: PackedAdapter, num_tokens: int
) -> Callable[[int, int, torch.Tensor, torch.Tensor | None], AddTo | None]:
    """`LoraBackend.begin` of a step of prompt rows with a loading adapter."""
    terms = no_terms(1, 1)
    terms[0, 0, 0] = (Source.HOST, 0, 0, content_number(packed.content_hash))
    routing = RowRouting(
        groups=((0,) * len(shape.sites),) * shape.num_layers,
        row_route=np.zeros(num_tokens, dtype=np.int32),
        terms=terms,
        adapters=[RoutedAdapter(packed.content_hash, packed.targets)],
    )
    none = torch.zeros(1, dtype=torch.int32)
    workers.backend.begin_step(StepTables(query_start=none, seq_lens=none, block_tables=none), routing)
    return workers.backend.begin


def operands(
    shape: ModelShape, site: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, y and the experts' ids of a prompt at a site."""
    chosen = shape.sites[site]
    top_k = shape.num_experts_per_token
    ids, num_rows, num_inputs = None, num_tokens, num_tokens
    if chosen.num_experts:
        number = torch.arange(num_tokens)[:, None] + torch.arange(top_k)
        ids = (number % chosen.num_experts).int()
        num_rows = num_tokens * top_k
        num_inputs = num_rows if chosen.name == "down" else num_tokens
    x = torch.randn(num_inputs, chosen.in_features).bfloat16()
    return x, torch.zeros(num_rows, chosen.total_out_features, dtype=torch.bfloat16), ids
