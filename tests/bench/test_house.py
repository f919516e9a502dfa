# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.harness.records import RESULTS
from bench.house import house_recorder, house_trace
from bench.house.house import count, page
from bench.house.sources import Source, code_lines, cycles
from moe_lora.report.results import read_results

_ONE = '''"""A file.

Of two paragraphs.
"""

from __future__ import annotations
import os  # a comment

TEXT = """two

lines"""


class Same:
    """Of a class."""

    def method(self) -> None:  # counts
        # does not
        return (
            1
        )
'''


def _tree(folder: Path, **files: str) -> Path:
    for part in ("cli", "bench", "demo"):
        (folder / part).mkdir(parents=True)
    for name, text in files.items():
        path = folder / "moe_lora" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_lines_without_blanks_comments_docstrings_and_imports() -> None:
    assert code_lines(Source("one.py", "one", _ONE, ast.parse(_ONE))) == 2 + 1 + 4


def test_importers_are_found_through_relative_imports_and_lazy_tables(tmp_path: Path) -> None:
    tree = _tree(
        tmp_path,
        __init__='_EXPORTS = {"Same": "moe_lora.lazy"}\n',
        lazy="class Same: ...\n",
        twice="class Same: ...\ndef shown(): ...\n",
        user="from . import twice\n",
        other="def late():\n    from moe_lora.twice import shown\n",
    )
    found = count(tree)
    assert found["files_with_one_importer"] == ["moe_lora/lazy.py"]
    assert found["class_names_twice"] == {"Same": ["moe_lora/lazy.py", "moe_lora/twice.py"]}
    assert found["parts"]["moe_lora"]["public_function_undocumented"] == 2


def test_a_cycle_by_a_deferred_import_is_none_at_import(tmp_path: Path) -> None:
    found = count(
        _tree(tmp_path, __init__="", a="from moe_lora import b\n", b="def f():\n    from .a import x\n")
    )
    assert found["cycles_at_import"] == []
    assert found["cycles_with_deferred_imports"] == [["moe_lora.a", "moe_lora.b"]]


def test_cycles_are_largest_sets() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}) == [
        ["a", "b", "c"],
        ["d", "e"],
    ]


def test_page_has_a_column_for_each_label(tmp_path: Path) -> None:
    result = count(_tree(tmp_path, __init__="", a=_ONE))
    labels = ("before", "after")
    records = [
        {"config": {"what": "counts", "label": label, "tree_commit": "0" * 40}, "result": result}
        for label in labels
    ]
    text = page(records)
    assert "|  | before | after |" in text
    assert "| code lines, moe_lora | 7 | 7 |" in text


def test_the_written_page_is_that_of_the_records() -> None:
    found = page(read_results(RESULTS / "house.jsonl"))
    assert (RESULTS / "house.md").read_text(encoding="utf-8") == found


def test_only_calls_while_a_window_is_open_are_counted(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree", __init__="", a="def outside(): ...\ndef inside(): ...\n")
    window = tmp_path / "window"
    window.write_bytes(b"\0")
    hook = f"import runpy\nrunpy.run_path({house_recorder.__file__!r})['record']()\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    code = (
        "import os, pathlib, signal, threading; from moe_lora import a\n"
        "os.kill(os.getpid(), signal.SIGUSR1); a.outside()\n"
        f"window = pathlib.Path({str(window)!r}).open('r+b', buffering=0); window.write(bytes([2]))\n"
        "thread = threading.Thread(target=a.inside); thread.start(); thread.join(); a.inside()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(tree)])
    variables = {"HOUSE_TRACE_FOLDER": str(tmp_path), "HOUSE_TRACE_TREE": str(tree), "PYTHONPATH": paths}
    subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize\n" + code], env=variables, cwd=tmp_path, check=True
    )
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [one["modules"] for one in found] == [["moe_lora", "moe_lora.a"]]
    calls = [tuple(call[:3]) for one in found for call in one["calls"]]
    assert set(calls) == {(2, "moe_lora/a.py", "inside:2")}
    assert sum(call[4] for one in found for call in one["calls"]) == 2


def _windows(idle: dict[str, dict[str, int]], *like: dict[str, dict[str, int]]) -> house_trace.Windows:
    """Calls of functions of one file by their callers: in 8 s of an idle server, in windows of 0.5 s."""
    calls: dict[int, house_trace.Calls] = {
        number: {"engine": {("a.py", name): Counter(callers) for name, callers in found.items()}}
        for number, found in enumerate([idle, *like], start=1)
    }
    seconds = {number: 8.0 if number == 1 else 0.5 for number in calls}
    return house_trace.Windows(calls, seconds, {"engine": set()})


def _entered(windows: house_trace.Windows) -> list[str]:
    found = house_trace.entered(windows, [1], sorted(windows.calls)[1:])
    return [name.removeprefix("a.py:") for name in found["functions"]]


def test_a_function_that_most_windows_enter_counts_and_a_rare_one_does_not() -> None:
    always, once = {"step": {"loop": 1}}, {"step": {"loop": 1}, "collect": {"loop": 1}}
    assert _entered(_windows({}, always, once, always, always, always, always)) == ["step"]


def test_a_heartbeat_counts_in_no_window_of_a_request() -> None:
    window = {"step": {"loop": 1}, "beat": {"timer": 1}}
    assert _entered(_windows({"beat": {"timer": 16}}, *[window] * 8)) == ["step"]


def test_a_function_of_heartbeats_and_requests_counts_by_its_caller_or_by_its_calls() -> None:
    window = {"send": {"beat": 1, "reply": 1}, "read": {"loop": 4}}
    assert _entered(_windows({"send": {"beat": 16}, "read": {"loop": 16}}, *[window] * 8)) == ["read", "send"]


def test_an_idle_server_enters_what_returns_every_second() -> None:
    windows = _windows({"beat": {"timer": 8}, "rare": {"timer": 1}})
    assert house_trace.entered(windows, [1], [1])["functions"] == ["a.py:beat"]
