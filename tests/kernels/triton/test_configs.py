# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.kernels.lora_spaces import config_space, save_table
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.lora.triton_lora import choose, forced
from tests.kernels.forked import output_of_fork
from tests.kernels.kernel_cases import QKV

TABLE = configs.load_table(configs.FALLBACK)


@pytest.mark.parametrize("path", sorted(configs.CONFIG_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_committed_tables_serve_every_kernel_dtype_and_phase(path):
    table = configs.load_table(path.stem)
    for phase in configs.PHASES:
        for dtype in ("bf16", "fp16", "fp32"):
            for choice in choose(QKV, dtype, table):
                for half in ("shrink", "expand"):
                    assert table.config(f"{choice.algorithm}_{half}", dtype, phase, 96, 146)


def test_space_is_made_of_configs_that_tables_take():
    for kernel in configs.KERNEL_NAMES:
        space = config_space(kernel)
        assert len({tuple(config.items()) for config in space}) == len(space) > 1
        for config in space:
            configs.check_config(kernel, config)


def test_first_entry_that_fits_counts_and_an_override_comes_before(tmp_path):
    config = config_space("vector_shrink")[0]
    special = configs.ConfigEntry(
        kernel="vector_shrink", config=config, dtype="bf16", in_features=96, out_features=146, state="tuned"
    )
    table = replace(TABLE, entries=(special, *TABLE.entries))
    assert table.config("vector_shrink", "bf16", "decode", 96, 146) == config
    general = TABLE.config("vector_shrink", "bf16", "decode", 96, 146)
    assert table.config("vector_shrink", "bf16", "decode", 96, 147) == general != config
    other = config_space("vector_shrink")[-1]
    with configs.override("vector_shrink", other):
        assert table.config("vector_shrink", "bf16", "decode", 96, 146) == other
    assert table.config("vector_shrink", "bf16", "decode", 96, 146) == config


def test_saved_table_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "CONFIG_DIR", tmp_path)
    saved = replace(TABLE, gpu="NVIDIA Test/1")
    assert save_table(saved).name == "NVIDIA_Test_1.json"
    assert configs.load_table("NVIDIA Test/1") == saved


@pytest.mark.parametrize("dependent", [False, True])
def test_table_says_whether_kernels_begin_while_the_ones_before_end(tmp_path, monkeypatch, dependent):
    """As read back from its file; only those that wait for the ones before."""
    monkeypatch.setattr(configs, "CONFIG_DIR", tmp_path)
    save_table(replace(TABLE, gpu="Test", dependent_launch=dependent))
    table, launched = configs.load_table("Test"), []
    monkeypatch.setattr(configs, "table_of", lambda device: table)
    monkeypatch.setattr(configs, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for module, name in (
        ("linear.expert_kernels", "expert_linear"),
        ("linear.quantised_kernels", "join_parts"),
    ):
        about = SimpleNamespace(__module__=f"moe_lora.kernels.triton.{module}", __name__=name)

        class Kernel:
            fn = about

            def __getitem__(self, grid):
                return lambda *operands, **meta: launched.append(meta)

        configs.start(Kernel(), 1, torch.empty(1), BLOCK=2)
    early = {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}
    assert launched == [{"BLOCK": 2, **early, **configs.OPTIONS}, {"BLOCK": 2, **configs.OPTIONS}]
    assert configs.OPTIONS == {"enable_fp_fusion": True}


def test_launches_name_modules_that_exist():
    root = Path(configs.__file__).parents[2]
    named = {
        name
        for path in root.rglob("*.py")
        for name in re.findall(r'\bkernels\("([\w.]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert {"signals", "lora.vector", "attention.kv_kernels"} <= named
    for name in sorted(named):
        assert importlib.util.find_spec(f"{configs.__package__}.{name}"), name


def test_kernels_that_wait_for_the_ones_before_exist():
    pytest.importorskip("triton")
    for module, name in (one.rsplit(".", 1) for one in configs.DEPENDENT):
        assert hasattr(configs.kernels(module), name)


PLACE = {"kernel": "wgmma_shrink", "dtype": "bf16", "in_features": 96}


@pytest.mark.parametrize("other", [{"block_k": 64}, {"split_k": 8}, {"part_k": 512}])
@pytest.mark.parametrize(
    "places",
    [
        ({"phase": "decode"}, {"phase": "prefill"}),
        ({"phase": "decode"}, {}),
        ({"phase": "decode", "out_features": 146}, {"phase": None, "in_features": None}),
        ({"phase": "prefill", "dtype": None, "in_features": None},),
    ],
)
def test_phases_that_would_add_in_different_orders_are_refused(tmp_path, monkeypatch, places, other):
    config = TABLE.config("wgmma_shrink", "bf16", "decode", 96, 146)
    rows = tuple(
        configs.ConfigEntry(**{**PLACE, **place}, config={**config, **(other if i == 0 else {})})
        for i, place in enumerate(places)
    )
    with pytest.raises(ValueError, match="different orders in decode and in prefill"):
        replace(TABLE, entries=(*rows, *TABLE.entries))
    monkeypatch.setattr(configs, "CONFIG_DIR", tmp_path)
    data = {"gpu": "bad", "note": "", "choices": [], "entries": [asdict(row) for row in rows + TABLE.entries]}
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="different orders in decode and in prefill"):
        configs.load_table("bad")


def test_phases_may_differ_in_tiles_and_stages():
    config = TABLE.config("wgmma_shrink", "bf16", "decode", 96, 146)
    own = {**config, "block_t": 32, "num_stages": 3, "programs_per_sm": 2}
    table = replace(TABLE, entries=(configs.ConfigEntry(**PLACE, phase="decode", config=own), *TABLE.entries))
    assert table.config("wgmma_shrink", "bf16", "decode", 96, 146) == own
    assert table.config("wgmma_shrink", "bf16", "prefill", 96, 146)["block_t"] == 64


def test_choice_by_phase_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "CONFIG_DIR", tmp_path)
    choice = {"algorithm": "vector", "phase": "decode"}
    data = {"gpu": "bad", "note": "", "choices": [choice], "entries": []}
    (tmp_path / "by_phase.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="'phase'"):
        configs.load_table("by_phase")


def test_unknown_gpu_gets_the_fallback():
    assert configs.load_table("Some GPU of 2031").entries == TABLE.entries


def test_wrong_configs_are_refused():
    config = config_space("vector_shrink")[0]
    for kernel, bad in [
        ("gemm", config),
        ("vector_shrink", {}),
        ("vector_shrink", {**config, "block_r": 0}),
        ("vector_shrink", {**config, "tile": 3}),
    ]:
        with pytest.raises(ValueError):
            configs.check_config(kernel, bad)
    with pytest.raises(ValueError):
        config_space("gemm")
    with pytest.raises(ValueError):
        configs.ConfigEntry(kernel="vector_shrink", config=config, state="guessed")
    with pytest.raises(ValueError):
        configs.ConfigEntry(kernel="vector_shrink", config=config, phase="warmup")
    with pytest.raises(ValueError):
        forced("simt")


def test_choices_must_cover_every_rank_once():
    small = configs.Choice(algorithm="vector", max_rank=16)
    for second in (
        configs.Choice(algorithm="wgmma", min_rank=16),
        configs.Choice(algorithm="wgmma", min_rank=18),
    ):
        with pytest.raises(ValueError, match="cover"):
            choose(QKV, "bf16", replace(TABLE, choices=(small, second)))
    both = (small, configs.Choice(algorithm="wgmma", min_rank=17))
    assert choose(QKV, "bf16", replace(TABLE, choices=both)) == both


def import_without_triton() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("triton", "moe_lora"):
            del sys.modules[name]
    sys.modules["triton"] = None
    fresh = importlib.import_module("moe_lora.kernels.triton.configs")
    importlib.import_module("moe_lora.kernels.triton.lora.triton_lora")
    assert fresh is not configs
    with pytest.raises(ImportError, match="pip install triton"):
        fresh.kernels("lora.wgmma_expand")
    print("imported")


def test_package_imports_without_triton(tmp_path):
    assert output_of_fork(import_without_triton, tmp_path / "out") == "imported\n"
