# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import itertools
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.aot import aot, sass
from moe_lora.kernels.triton import configs
from tests.kernels.forked import output_of_fork

USAGE = " Function wgmma_shrink:\n  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:648 TEXTURE:0"
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0100*/              @!P0 UTMALDG.2D [UR8], [UR4] ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0120*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R6.64] ;
"""


def test_pipeline_and_spills_are_read_from_listings():
    good = sass.parse(USAGE, SASS, 1000)
    assert good.registers == 168
    assert good.complaints(sass.MARKS) == []
    lost = sass.parse(USAGE, SASS.replace("HGMMA", "HMMA"), 1000)
    assert lost.complaints(sass.MARKS) == ["lost HGMMA"]
    narrow = sass.parse(USAGE, SASS.replace("BYPASS.128", "64"), 1000)
    assert narrow.complaints(sass.MARKS) == ["lost LDGSTS.128"]
    spilled = sass.parse(USAGE, SASS.replace("LDC", "@P1 STL"), 1000)
    assert "spills" in spilled.complaints()[0]
    unsafe = sass.parse(USAGE, SASS.replace("LDC", "USETMAXREG.DEALLOC.CTAPOOL"), 1000)
    assert "warp-specialized" in unsafe.complaints()[0]
    assert "has waited" in good.complaints(dependent=True)[0]
    waiting = sass.parse(USAGE, SASS.replace("LDC R1, c[0x0][0x28]", "ACQBULK"), 1000)
    assert waiting.complaints(dependent=True) == []
    late = sass.parse(USAGE, SASS + "        /*0130*/                   ACQBULK ;\n", 1000)
    assert "has waited" in late.complaints(dependent=True)[0]
    for usage in (USAGE.replace("STACK:0", "STACK:8"), USAGE.replace("LOCAL:0", "LOCAL:8")):
        assert "spills" in sass.parse(usage, SASS, 1000).complaints()[0]
    assert "shared memory" in sass.parse(USAGE, SASS, 230 * 1024).complaints()[0]
    assert "registers" in replace(good, registers=256).complaints()[0]
    with pytest.raises(ValueError, match="no resource usage"):
        sass.parse("cuobjdump fatal", SASS, 0)


TTGIR = """
  %0 = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable>
  %1 = ttg.local_alloc : () -> !ttg.memdesc<3x1xi64, #shared1, #smem, mutable>
  %2 = ttg.local_alloc %h : (tensor<64x16xbf16, #mma>) -> !ttg.memdesc<64x16xbf16, #shared, #smem>
"""


def test_bytes_in_flight_are_those_of_all_buffers_of_a_ring_but_one():
    one = replace(sass.parse(USAGE, SASS, 60 * 1024), rings=sass.rings_of(TTGIR))
    assert [one.in_flight_per_sm(programs) for programs in (1, 3, 9)] == [32768, 3 * 32768, 3 * 32768]


def test_a_ring_does_not_stand_for_another_of_the_same_size():
    """In prefill those of x are as large as those of weights."""
    one = replace(sass.parse(USAGE, SASS, 60 * 1024), rings=sass.rings_of(TTGIR))
    assert one.complaints(rings=((3, 64, 128),)) == []
    assert one.complaints(rings=((3, 64, 128),) * 2) == ["lost 3 buffers of 64 x 128"]
    assert one.complaints(rings=((4, 64, 128),)) == ["lost 4 buffers of 64 x 128"]


def wgmma_build(kernel: str, phase: str = "decode") -> aot.Build:
    config = configs.load_table(configs.FALLBACK).config(kernel, "bf16", phase, 4096, 4096)
    return next(b for b in aot.config_builds(kernel, config, "bf16", 2, 1) if b.rings)


class Owned:
    """Garbage that is only for the process that made it, as a process group and its threads."""

    def __init__(self, told) -> None:
        self.cycle, self.told, self.pid = self, told, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.told.touch()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """Triton's folder of compiled code."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


def test_sgmv_requires_copies_by_tma_in_prefill_alone():
    builds = [wgmma_build("wgmma_shrink", phase) for phase in configs.PHASES]
    assert [sass.TMA in build.required for build in builds] == [False, True]


@pytest.mark.slow
def test_sgmv_compiles_to_the_pipeline_it_was_written_for(cache, tmp_path):
    builds = [wgmma_build("wgmma_shrink", phase) for phase in configs.PHASES]
    Owned(tmp_path / "collected")
    assert aot.check(builds, processes=1) == []
    assert not (tmp_path / "collected").exists(), "by a worker"


@pytest.mark.slow
def test_what_was_compiled_is_found_in_its_folder(cache):
    """By a second run, as a launch beside a GPU looks for it."""
    build, found = wgmma_build("wgmma_shrink"), []
    for _ in range(2):
        assert aot.check([build], processes=1) == []
        found.append({path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()})
    assert any(path.suffix == ".cubin" for path in found[0])
    assert found[0] == found[1]


def test_kernel_that_lost_its_pipeline_fails_the_check(capsys):
    build = wgmma_build("wgmma_expand")
    plain = replace(build, meta={**build.meta, "STAGES": 1, "num_stages": 1})
    wrong = aot.check([plain], processes=1)
    assert any("lost 3 buffers of 64 x 128" in one for one in wrong)
    assert "!" in capsys.readouterr().out


def test_kernel_that_does_not_compile_fails_the_check(capsys):
    build = wgmma_build("wgmma_shrink")
    broken = replace(build, meta={**build.meta, "BLOCK_K": 100})
    assert "does not compile" in aot.check([broken], processes=1)[0]


@pytest.fixture(scope="module")
def builds() -> list[aot.Build]:
    return aot.table_builds()


def test_deciding_builds_have_every_constant_of_every_kernel_and_dtype(builds):
    def met(some):
        names = {(b.module, b.kernel, b.dtype, *constant) for b in some for constant in b.meta.items()}
        return names | {(b.kernel, b.dtype, b.required) for b in some}

    few = aot.deciding(builds)
    assert all(one in builds for one in few)
    assert met(few) == met(builds)
    assert len(few) < len(builds) / 2


def test_few_builds_have_every_kernel_with_every_dtype_and_required_instruction(builds):
    def met(some):
        return {(b.kernel, b.dtype, b.required) for b in some}

    few = aot.deciding(builds, constants=False)
    assert met(few) == met(builds)
    assert len(few) < len(aot.deciding(builds)) / 2


def test_every_kernel_of_the_tables_is_built(builds):
    assert {build.kernel for build in builds} >= {
        *configs.KERNEL_NAMES,
        "ask",
        "sort_rows",
        "wait",
        "cut_tiles",
        "write_kv",
        "attend",
        "quantised_tiles",
        "join_parts",
    }
    pipelined = [b for b in builds if b.kernel.startswith("wgmma") and b.rings]
    assert {(b.kernel, b.meta.get("TMA", False), b.dtype) for b in pipelined} == {
        *itertools.product(("wgmma_shrink", "wgmma_expand"), (False, True), ("bf16", "fp16")),
    }
    assert all((sass.TMA if b.meta.get("TMA") else sass.COPIES) in b.required for b in pipelined)
    assert {b.meta["ONE_LANE"] for b in pipelined if b.kernel == "wgmma_expand"} == {False, True}
    for kernel in ("wgmma_shrink", "wgmma_expand"):
        assert {b.meta["SPLIT_K"] for b in pipelined if b.kernel == kernel} == {1, 2, 3, 4}
    assert {b.meta["EVEN"] for b in pipelined if b.kernel != "wgmma_expand"} == {False, True}
    for kernel in configs.KERNEL_NAMES:
        found = {(build.dtype, build.meta["MODULES"]) for build in builds if build.kernel == kernel}
        dtypes = {"bf16", "fp16"} | ({"fp32"} if kernel.startswith("vector") else set())
        assert {dtype for dtype, _ in found} == dtypes
        assert {modules for dtype, modules in found if dtype == "bf16"} == {1, 2, 3}
    splits = {b.meta["SPLIT_K"] for b in builds if b.kernel == "vector_shrink"}
    expands = [b.meta for b in builds if b.kernel == "vector_expand"]
    assert {b["SPLIT_K"] for b in expands} == splits
    assert {(b["ADD"], b["PADDED"]) for b in expands} == set(itertools.product((True, False), repeat=2))


def test_prompts_attend_by_wgmma_and_decode_in_parts():
    builds = [build for build in aot.attention_builds() if build.kernel == "attend"]
    places = {(b.dtype, b.meta["HEAD_DIM"], b.meta["GROUP"], b.meta["SINGLE"]) for b in builds}
    assert places >= set(itertools.product(("bf16",), (64, 128), (1, 4, 5, 8), (True, False)))
    assert {head_dim for _, head_dim, _, _ in places} == {64, 80, 96, 128, 256, 512}
    wide = {b.label for b in builds if b.meta["HEAD_DIM"] > 256}
    assert all(
        ("HGMMA" in b.required) == (not b.meta["SINGLE"] and b.dtype != "fp32" and b.label not in wide)
        for b in builds
    )


@pytest.mark.slow
def test_the_widest_heads_fit_the_registers_and_the_shared_memory(cache):
    """Prompts of 64 rows of 512 needed 263 KB of an SM's 232, so no prompt ran."""
    wide = [b for b in aot.attention_builds() if b.kernel == "attend" and b.meta["HEAD_DIM"] > 256]
    assert {b.meta["SINGLE"] for b in wide} == {False, True}
    assert aot.check([b for b in wide if not b.meta["DEPENDENT"]], processes=1) == []


@pytest.mark.slow
def test_prompts_and_quantised_layers_compile_to_tensor_cores(builds):
    attention = [b for b in aot.attention_builds() if b.kernel == "attend" and b.required]
    largest = next(b for b in attention if b.label == "head_dim=128 group=8 window, sinks")
    quantised = [b for b in builds if b.kernel == "quantised_tiles" and b.meta["NAME"] == "int4"]
    assert aot.check([largest, next(b for b in quantised if b.meta["HAS_ZERO"])], processes=1) == []


def test_quantised_layers_are_built_in_every_format_for_tensor_cores(builds):
    builds = [build for build in builds if build.kernel == "quantised_tiles"]
    assert {(one.dtype, one.meta["NAME"]) for one in builds} == set(
        itertools.product(("bf16", "fp16", "fp32"), ("int8", "int4", "fp8", "mxfp4"))
    )
    assert len({(one.meta["HAS_IDS"], one.meta["APART"], one.meta["BLOCK_T"]) for one in builds}) == 4
    assert all(one.required == (() if one.dtype == "fp32" else (sass.TENSOR_CORES,)) for one in builds)


def test_numbers_of_a_batch_are_in_no_tuple_where_triton_would_compile_for_each_value(builds):
    tuples = [one for build in builds for one in build.operands if isinstance(one, tuple)]
    numbers = {part for one in tuples for part in one if isinstance(part, int)}
    assert numbers <= {0, *aot._WIDTHS.values()}


VARYING = {"num_rows", "num_slots", "num_tokens", "num_seqs", "table_stride", "tile_rows", "max_polls"}
"""Numbers that differ from one step to the next, by the names that kernels give them."""


def test_numbers_of_a_batch_lead_to_no_other_compilation(builds):
    """Triton compiles another code where a number is 1, and where it is a multiple of 16."""
    kernels = {getattr(importlib.import_module(one.module), one.kernel) for one in builds}
    numbers = [(one.fn.__name__, param) for one in kernels for param in one.params if param.name in VARYING]
    specialised = [
        (kernel, param.name)
        for kernel, param in numbers
        if not (param.do_not_specialize or param.is_constexpr)
    ]
    assert specialised == []
    assert {"sort_rows", "cut_tiles", "expert_linear", "attend"} <= {kernel for kernel, _ in numbers}


def ask_for_help() -> None:
    sys.argv[1:] = ["--help"]
    runpy.run_module("bench.gpu.aot.aot", run_name="__main__", alter_sys=True)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_command_explains_itself(tmp_path):
    assert "sm_90a" in output_of_fork(ask_for_help, tmp_path / "out")
