"""An instance of the LoRA Server adds the bits that the local backend adds, whatever the layout and medium.

The whole product is checked by `bench/check_lora_server.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import pytest

from .cluster import Tokens, local_tokens, served_tokens
from .combinations import FACTORS, is_possible, title
from .covering import Row, all_rows, covering_rows, pairs_of
from .served_models import ServedModel, make_served_model

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


@pytest.mark.parametrize("row", covering_rows(FACTORS, is_possible), ids=title)
def test_bits_and_tokens_are_those_of_the_local_backend(row: Row, expected: Expected) -> None:
    model, tokens = expected(row["family"], row["dtype"])
    complaints = served_tokens(model, row).complaints(tokens)
    assert not complaints, f"{title(row)}: {'; '.join(complaints)}"


def test_rows_cover_every_pair_that_is_possible() -> None:
    rows = covering_rows(FACTORS, is_possible)
    covered = set().union(*map(pairs_of, rows))
    for (one, ones), (other, others) in combinations(FACTORS.items(), 2):
        for pair in product(ones, others):
            impossible = {one, other} == {"family", "expert_parallel"} and set(pair) == {"llama", "2"}
            assert (tuple(zip((one, other), pair, strict=True)) in covered) != impossible
    assert len(rows) < len(all_rows(FACTORS, is_possible)) / 4
