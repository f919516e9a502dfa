# SPDX-License-Identifier: Apache-2.0
"""The support matrix: the page is the generator's, tests and records exist, a cell has one evidence."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.harness.records import RESULTS, ROOT
from bench.pages.blocks import complaints, pages
from bench.pages.evidence import records
from bench.pages.support import DEVICES, EVIDENCE, FAMILIES, FEATURES, InCi, RanOnce, matrix
from tests.families import ALL_FAMILIES as TESTED_FAMILIES
from tests.patience import PATIENCE_S

TESTS = [one for one in EVIDENCE if isinstance(one, InCi)]
RECORDS = [one for one in EVIDENCE if isinstance(one, RanOnce)]
PAGE = ROOT / "docs" / "reference" / "support.md"


@pytest.fixture(autouse=True)
def in_a_clone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")


def test_the_page_is_what_the_generator_writes() -> None:
    assert list(complaints(PAGE)) == []
    assert matrix() in PAGE.read_text(encoding="utf-8")


def test_every_family_has_a_row() -> None:
    assert set(FAMILIES) == set(TESTED_FAMILIES)


@pytest.mark.parametrize("one", EVIDENCE, ids=lambda one: f"{one.device} {one.feature} {one.families[0]}")
def test_evidence_is_for_known_cells(one: InCi | RanOnce) -> None:
    assert one.device in DEVICES
    assert one.feature in FEATURES
    assert set(one.families) <= set(FAMILIES)


def test_a_cell_has_one_evidence() -> None:
    cells = Counter((one.device, one.feature, family) for one in EVIDENCE for family in one.families)
    assert [cell for cell, number in cells.items() if number > 1] == []


@pytest.mark.parametrize("test", sorted({one.test for one in TESTS}))
def test_named_tests_exist(test: str) -> None:
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _write_cases(marker: str, names: list[str], path: Path) -> None:
    """Write the names of the cases that pytest collects; a fork has the modules of the tests already."""
    os.chdir(ROOT)
    with path.open("w") as file, contextlib.redirect_stdout(file):
        pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", marker, *names]
        )


@pytest.mark.parametrize(
    ("marker", "is_slow"),
    [("not slow and not gpu", False), pytest.param("slow", True, marks=pytest.mark.slow)],
)
def test_named_tests_have_a_case_of_the_run_for_each_family(
    marker: str, is_slow: bool, tmp_path: Path
) -> None:
    """A marker, or a family that leaves the parameters, would empty a cell."""
    named = [one for one in TESTS if one.slow == is_slow]
    found = multiprocessing.get_context("fork").Process(
        target=_write_cases, args=(marker, sorted({one.test for one in named}), tmp_path / "cases")
    )
    found.start()
    found.join(PATIENCE_S)
    assert found.exitcode == 0
    cases = [line for line in (tmp_path / "cases").read_text().splitlines() if "::" in line]
    missing = []
    for one in named:
        of_test = [case.removeprefix(one.test) for case in cases if case.split("[")[0] == one.test]
        for family in one.families:
            if not any(
                family in case.strip("[]").replace(" ", "-").split("-") for case in of_test if one.named
            ):
                missing += [] if of_test and not one.named else [(one.test, family)]
    assert missing == [], cases


_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n(?=[-|#\n])")
# A plan's field is "Never ran there".
_UNRUN = re.compile(
    r"(?:has|have)(?: not|n't)(?: yet)? (?:been )?run (?:on|yet)|no device yet"
    r"|never ran\b(?! there)|(?:has|have) never (?:been )?run|no (?:engine|device|GPU) has\b",
    re.IGNORECASE,
)


def _unlinked(text: str) -> list[str]:
    """Sentences that name a missing run without a link to the matrix."""
    sentences = [" ".join(one.split()) for one in _SENTENCES.split(_CODE.sub("", text))]
    return [one for one in sentences if _UNRUN.search(one) and "support.md" not in one]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Two hosts\nnever ran. It works.", ["Two hosts never ran."]),
        ("- No engine has merged.\n- More", ["- No engine has merged."]),
        ("It [never ran](../reference/support.md) on two.", []),
        ("```\nIt has never run\n```\n", []),
        ("| Never ran there | parts |", []),
    ],
)
def test_sentences_without_a_link_are_found(text: str, found: list[str]) -> None:
    assert _unlinked(text) == found


def test_other_pages_link_to_the_matrix_instead_of_saying_it() -> None:
    """Results pages name their gaps themselves."""
    texts = {
        str(page.relative_to(ROOT)): page.read_text("utf-8")
        for page in pages()
        if page.parent.name != "results" and page != PAGE
    }
    assert {name: found for name, text in texts.items() if (found := _unlinked(text))} == {}
    linking = [name for name, text in texts.items() if "reference/support.md)" in text]
    guides = ("parallel", "lora_server", "host_assisted", "quantised")
    assert {"README.md", *(f"docs/guides/{name}.md" for name in guides)} <= set(linking)


@pytest.mark.parametrize("one", RECORDS, ids=lambda one: f"{one.feature} {one.families[0]}")
def test_named_records_exist(one: RanOnce) -> None:
    assert (RESULTS / one.file).is_file()
    assert records(one.file, one.keeps)
