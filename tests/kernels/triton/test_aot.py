from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from moe_lora.kernels.triton import aot, configs
from moe_lora.kernels.triton import aot as sass

USAGE = " Function wgmma_shrink:\n  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:648 TEXTURE:0"
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0100*/              @!P0 UTMALDG.2D [UR8], [UR4] ;
        /*0110*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0120*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
"""


def test_pipeline_and_spills_are_read_from_listings():
    good = sass.parse(USAGE, SASS, 1000)
    assert good.registers == 168
    assert good.complaints(sass.PIPELINE) == []
    lost = sass.parse(USAGE, SASS.replace("HGMMA", "HMMA"), 1000)
    assert lost.complaints(sass.PIPELINE) == ["lost HGMMA"]
    spilled = sass.parse(USAGE, SASS.replace("LDC", "@P1 STL"), 1000)
    assert "spills" in spilled.complaints()[0]
    unsafe = sass.parse(USAGE, SASS.replace("LDC", "LDGSTS.E.BYPASS.128"), 1000)
    assert "nobody wait" in unsafe.complaints()[0]
    for usage in (USAGE.replace("STACK:0", "STACK:8"), USAGE.replace("LOCAL:0", "LOCAL:8")):
        assert "spills" in sass.parse(usage, SASS, 1000).complaints()[0]
    assert "shared memory" in sass.parse(USAGE, SASS, 230 * 1024).complaints()[0]
    assert "registers" in replace(good, registers=256).complaints()[0]
    with pytest.raises(ValueError, match="no resource usage"):
        sass.parse("cuobjdump fatal", SASS, 0)


def wgmma_build(kernel: str, **changes: object) -> aot.Build:
    config = configs.load_table(configs.FALLBACK).config(kernel, "bf16", "decode", 4096, 4096)
    return next(
        b
        for b in aot.config_builds(kernel, {**config, **changes}, "bf16", 2, 1)
        if b.required == sass.PIPELINE
    )


def test_sgmv_compiles_to_the_pipeline_it_was_written_for():
    assert aot.check([wgmma_build("wgmma_shrink")], processes=1) == []


def test_kernel_that_lost_its_pipeline_fails_the_check(capsys):
    build = wgmma_build("wgmma_expand")
    plain = replace(build, meta={**build.meta, "WARP_SPECIALIZE": False, "ALIGNED": False})
    wrong = aot.check([plain], processes=1)
    assert len(wrong) == 1
    assert "lost USETMAXREG" in wrong[0]
    assert "!" in capsys.readouterr().out


def test_kernel_that_does_not_compile_fails_the_check(capsys):
    build = wgmma_build("wgmma_shrink")
    broken = replace(build, meta={**build.meta, "BLOCK_K": 100})
    assert "does not compile" in aot.check([broken], processes=1)[0]


def test_every_kernel_of_the_tables_is_built():
    builds = aot.table_builds()
    assert {build.kernel for build in builds} >= {
        *configs.KERNEL_NAMES,
        "join_splits",
        "sort_rows",
        "cut_tiles",
    }
    assert all(build.required == sass.PIPELINE for build in builds if build.meta.get("WARP_SPECIALIZE"))
    assert sum(bool(build.required) for build in builds) >= 4
    for kernel in configs.KERNEL_NAMES:
        found = {(build.dtype, build.meta["MODULES"]) for build in builds if build.kernel == kernel}
        dtypes = {"bf16", "fp16"} | ({"fp32"} if kernel.startswith("vector") else set())
        assert {dtype for dtype, _ in found} == dtypes
        assert {modules for dtype, modules in found if dtype == "bf16"} == {1, 2, 3}
    splits = {b.meta["SPLIT_K"] for b in builds if b.kernel == "vector_shrink"}
    expands = [b.meta for b in builds if b.kernel == "vector_expand"]
    assert {b["SPLIT_K"] for b in expands} == splits
    assert {(b["ADD"], b["PADDED"]) for b in expands} == set(itertools.product((True, False), repeat=2))


def test_numbers_of_a_batch_are_in_no_tuple_where_triton_would_compile_for_each_value():
    tuples = [one for build in aot.table_builds() for one in build.operands if isinstance(one, tuple)]
    numbers = {part for one in tuples for part in one if isinstance(part, int)}
    assert numbers <= {0, *aot._WIDTHS.values()}


def test_command_explains_itself():
    command = [sys.executable, "-m", "moe_lora.kernels.triton.aot", "--help"]
    assert "sm_90a" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
