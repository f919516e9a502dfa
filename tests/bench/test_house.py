from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.house import house_trace
from bench.house.house import code_lines, count, cycles, page

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
    assert code_lines(_ONE, ast.parse(_ONE)) == 2 + 1 + 4


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


def test_only_functions_entered_while_a_window_is_open_are_noted(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree", __init__="", a="def outside(): ...\ndef inside(): ...\n")
    window = tmp_path / "window"
    window.write_bytes(b"\0")
    hook = f"import runpy\nrunpy.run_path({house_trace.__file__!r})['record']()\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    code = (
        "import pathlib, threading; from moe_lora import a; a.outside()\n"
        f"window = pathlib.Path({str(window)!r}).open('r+b', buffering=0); window.write(bytes([2]))\n"
        "thread = threading.Thread(target=a.inside); thread.start(); thread.join(); window.close()\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(tree)])
    variables = {"HOUSE_TRACE_FOLDER": str(tmp_path), "HOUSE_TRACE_TREE": str(tree), "PYTHONPATH": paths}
    subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize\n" + code], env=variables, cwd=tmp_path, check=True
    )
    lines = [json.loads(one) for path in tmp_path.glob("*.jsonl") for one in path.read_text().splitlines()]
    assert [(one["window"], one["file"], one["name"]) for one in lines] == [(2, "moe_lora/a.py", "inside")]
