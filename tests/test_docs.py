"""Pages find each other: every link between them names a page, and a heading that is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


def headings(page: Path) -> set[str]:
    """Anchors of a page as GitHub makes them: lower case, words joined by hyphens."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).splitlines()
    found = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_name_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert not broken


def test_pages_named_in_code_exist() -> None:
    named = {
        (match, str(file.relative_to(ROOT)))
        for part in ("moe_lora", "cli", "bench", "demo", "examples", "docs")
        for file in (ROOT / part).rglob("*.*")
        if file.suffix in {".py", ".md", ".yaml"}
        for match in re.findall(r"\bdocs/[\w/]+\.md", file.read_text(encoding="utf-8"))
    }
    assert {one for one in named if not (ROOT / one[0]).exists()} == set()
