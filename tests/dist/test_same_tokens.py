# SPDX-License-Identifier: Apache-2.0
"""An instance of the LoRA Server adds the bits that the local backend adds, whatever the layout and medium.

The whole product is checked by `bench/lora_server/check_lora_server.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from moe_lora.core.progress import silent
from moe_lora.models.quantised_checkpoint import quantise_checkpoint
from moe_lora.models.quantised_weight import quantisation_of
from tests.families import BESIDE_FAMILIES, FURTHER, NEWER, RECURRENT_FAMILIES, later
from tests.grids import with_quick

from .combinations import FACTORS, beside_rows, is_possible, title
from .covering import Row, all_rows, covering_rows, pairs_of, rows_of_all_values
from .forked_cluster import Tokens, local_tokens, served_tokens
from .served_models import ServedModel, make_served_model

ROWS = covering_rows(FACTORS, is_possible)
QUICK = rows_of_all_values(ROWS)
"""Rows of the default run."""
Expected = Callable[[str, str], tuple[ServedModel, Tokens]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """(family, dtype) -> the model, and what the local backend answers."""
    models: dict[str, ServedModel] = {}
    tokens: dict[tuple[str, str], Tokens] = {}

    def find(family: str, dtype: str) -> tuple[ServedModel, Tokens]:
        if family not in models:
            models[family] = make_served_model(family, tmp_path_factory.mktemp(family))
        if (family, dtype) not in tokens:
            tokens[family, dtype] = local_tokens(models[family], dtype)
        return models[family], tokens[family, dtype]

    return find


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=title(row), marks=() if row in QUICK else pytest.mark.slow) for row in ROWS]
    + [
        pytest.param(row, id=title(row), marks=() if number < len(BESIDE_FAMILIES) else pytest.mark.slow)
        for number, row in enumerate(beside_rows())
    ],
)
def test_bits_and_tokens_are_those_of_the_local_backend(row: Row, expected: Expected) -> None:
    model, tokens = expected(row["family"], row["dtype"])
    complaints = served_tokens(model, row).complaints(tokens)
    assert not complaints, f"{title(row)}: {'; '.join(complaints)}"


@pytest.mark.parametrize("sites", with_quick(["all", "experts"], ["experts"]))
def test_small_arena_beside_a_server_changes_no_token(sites: str, expected: Expected) -> None:
    """All its pages are for KV, or for KV and the dense part of adapters."""
    model, tokens = expected("mixtral", "float32")
    row = {name: values[0] for name, values in FACTORS.items()} | {"family": "mixtral", "sites": sites}
    small = {"kv_cache_gb": None, "max_model_len": 96, "swap_interval_s": 0.005}
    arena_mb = 0.06 if sites == "all" else 0.16
    outcome = served_tokens(model, row, arena_mb=arena_mb, host_arena_mb=0.5, **small)
    assert not outcome.complaints(tokens)


def test_quantised_base_beside_a_server_changes_no_token(expected: Expected, tmp_path: Path) -> None:
    """Quantised at load; and as it is stored, its experts on two ranks."""
    model, plain = expected("mixtral", "float32")
    row = {name: values[0] for name, values in FACTORS.items()} | {"family": "mixtral"}
    tokens = local_tokens(model, "float32", quantize="int8")
    assert not served_tokens(model, row, quantize="int8").complaints(tokens)
    assert tokens != plain, "the base is another one"
    int8 = quantisation_of("int8", None, False)
    assert int8 is not None
    quantise_checkpoint(model.model_dir, tmp_path / "int8", int8, torch.float32, silent)
    stored = replace(model, model_dir=tmp_path / "int8")
    assert not served_tokens(stored, row | {"expert_parallel": "2"}).complaints(tokens)


@pytest.mark.parametrize(
    "family", later("phi3", "gemma4", families=(*FURTHER, *RECURRENT_FAMILIES, "gemma4", *NEWER))
)
def test_a_server_changes_no_token_of_the_later_families(family: str, expected: Expected) -> None:
    """The layers' pieces lie outside the sites that a server computes."""
    model, tokens = expected(family, "float32")
    row = {name: values[0] for name, values in FACTORS.items()} | {"family": family}
    assert not served_tokens(model, row).complaints(tokens)


DIVIDED = [
    ("llama", "EP1-PP1", 1, "auto", "float32", "shm"),
    ("mixtral", "EP2-PP1", 2, "all", "float32", "shm"),
    ("glm4_moe", "EP2-PP2", 2, "all", "bfloat16", "gloo"),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("llama", "EP2-PP2", 1, "all", "bfloat16", "gloo"),
            ("mixtral", "EP2-PP1", 1, "auto", "float32", "shm"),
            ("gpt_oss", "EP2-PP1", 1, "all", "bfloat16", "gloo"),
            ("qwen2_moe", "EP1-PP2", 2, "all", "float32", "shm"),
            ("afmoe", "EP4-PP1", 2, "all", "float32", "shm"),
            ("olmoe", "EP2-PP1", 1, "all", "float32", "shm"),
            ("phi3", "EP1-PP1", 1, "all", "float32", "shm"),
        )
    ),
]


@pytest.mark.parametrize(("family", "layout", "expert", "sites", "dtype", "transport"), DIVIDED)
def test_ranks_that_divide_sites_have_the_bits_of_the_local_backend(
    family: str, layout: str, expert: int, sites: str, dtype: str, transport: str, expected: Expected
) -> None:
    """Two ranks with tensor parallelism.  The tokens are of such ranks without a server."""
    model, _ = expected(family, "float32")
    tokens = local_tokens(model, dtype, tensor_parallel=2, expert_parallel=expert)
    row = {name: values[0] for name, values in FACTORS.items()} | {"layout": layout, "sites": sites}
    row |= {"family": family, "dtype": dtype, "expert_parallel": str(expert), "transport": transport}
    complaints = served_tokens(model, row, tensor_parallel=2).complaints(tokens)
    assert not complaints, "; ".join(complaints)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_compiled_layers_add_the_same_bits(family: str, expected: Expected) -> None:
    row = {name: values[0] for name, values in FACTORS.items()} | {"family": family, "layout": "EP2-PP2"}
    row["expert_parallel"] = "2" if family == "mixtral" else "1"
    model, tokens = expected(family, "float32")
    assert not served_tokens(model, row, eager=False).complaints(tokens)


def test_rows_cover_every_pair_that_is_possible() -> None:
    rows, possible = ROWS, all_rows(FACTORS, is_possible)
    wanted = {
        tuple(zip(names, values, strict=True))
        for names in combinations(FACTORS, 2)
        for values in product(*(FACTORS[name] for name in names))
    }
    dense = ("family", "llama")
    wanted -= {(dense, ("expert_parallel", "2")), (dense, ("sites", "experts"))}
    assert set().union(*map(pairs_of, rows)) == wanted
    assert all(map(is_possible, rows))
    assert len(rows) < len(possible) / 8
    for name, values in FACTORS.items():
        assert {row[name] for row in QUICK} == set(values)
