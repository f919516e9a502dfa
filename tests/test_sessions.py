# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages print what the pages say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.house.language import Session, sessions
from bench.pages.sessions import alike, differences, rewritten

ROOT = Path(__file__).parents[1]
SLOW = {
    "adapters.md",
    "batches.md",
    "cli.md",
    "cluster.md",
    "host_assisted.md",
    "limits.md",
    "lora_server.md",
    "migration.md",
    "parallel.md",
    "provisioning.md",
    "quantised.md",
    "registry.md",
    "troubleshooting.md",
    "tutorial.md",
}
"""Pages that take over 5 s of a processor, and whose behaviour other tests of the default run hold."""
PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ())
    for page in sorted({one.page for one in sessions(ROOT)})
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None and "curl " in page.read_text(encoding="utf-8"):
        pytest.skip("no curl here")
    assert [str(one) for one in differences(page, tmp_path)] == []


def test_a_changed_word_and_a_silent_command_differ_and_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = ("$ echo one; echo two\none\n...", "$ cd demo\n$ echo 8000\n9")
    text = "".join(f"```console\n{one}\n```\nbetween\n" for one in blocks)
    page.write_text(text)
    folder = tmp_path / "folder"
    folder.mkdir()
    (found,) = differences(page, folder)
    assert (found.session.commands, found.found) == (("cd demo", "echo 8000"), "8000")
    assert rewritten(text, [found]) == text.replace("\n9\n", "\n8000\n")


@pytest.mark.parametrize(
    ("found", "is_alike"),
    [
        ("took 3 ms of 4", True),
        ("took 3 s of 4", False),
        ("took \n3 ms of 4", True),
        ("took 3 ms of 5", False),
    ],
)
def test_three_dots_stand_for_any_text(found: str, is_alike: bool) -> None:
    assert alike(Session(Path("page"), ("time",), "took ... ms of 4", 0), found) is is_alike
