# SPDX-License-Identifier: Apache-2.0
"""Pages find each other and the code: links, link texts and modules exist, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.house.interface import settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_lora"
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_texts_name_the_linked_page(page: Path) -> None:
    wrong = []
    for text, link in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target = (page.parent / link.partition("#")[0]).resolve()
        for named in re.findall(r"[\w/.-]+\.(?:md|jsonl|json|png|py)\b", text):
            words = Path(named.replace("../", "")).parts
            if "://" not in link and target.parts[-len(words) :] != words:
                wrong.append(f"[{text}]({link})")
    assert not wrong


def exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, or a name written in a module."""
    folder, words = PACKAGE, name.removeprefix("moe_lora.").split(".")
    for number, word in enumerate(words):
        if (folder / word).is_dir():
            folder /= word
            continue
        file, rest = folder / f"{word}.py", words[number + 1 :]
        if not file.exists():
            file, rest = folder / "__init__.py", words[number:]
        return file.exists() and all(re.search(rf"\b{one}\b", file.read_text("utf-8")) for one in rest)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_named_on_pages_exist(page: Path) -> None:
    """Settings of the cluster file and fields of records (`config.…`) are no modules."""
    if page.name == "CHANGELOG.md" or page.is_relative_to(ROOT / "bench" / "results"):
        return  # they name modules of older versions
    folders = "|".join(one.name for one in PACKAGE.iterdir() if one.is_dir() and one.name != "config")
    names = re.findall(
        rf"(?<![\w./-])(?:moe_lora\.)?(?:{folders})(?:\.[A-Za-z_]\w*)+\b(?![\w/])",
        page.read_text(encoding="utf-8"),
    )
    files = (".md", ".py", ".json", ".jsonl", ".yaml", ".log", ".pem", ".safetensors")
    unknown = {name for name in names if not name.endswith(files)} - set(settings())
    assert {name for name in unknown if not exists(name)} == set()


def test_the_example_of_the_simulator_runs() -> None:
    page = (ROOT / "docs/explanation/simulator.md").read_text(encoding="utf-8")
    for program in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "ttft" in done.stdout


def test_pages_named_in_code_exist() -> None:
    named = {
        (match, str(file.relative_to(ROOT)))
        for part in ("moe_lora", "cli", "bench", "demo", "examples", "docs")
        for file in (ROOT / part).rglob("*.*")
        if file.suffix in {".py", ".md", ".yaml"}
        for match in re.findall(r"\bdocs/[\w/]+\.md", file.read_text(encoding="utf-8"))
    }
    assert {one for one in named if not (ROOT / one[0]).exists()} == set()
