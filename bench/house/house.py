# SPDX-License-Identifier: Apache-2.0
"""How large the code is, how it is divided, and how much of it one request enters.

    python -m bench.house.house [--tree DIR] [--label NAME] [--out FILE]  # counts of a checkout
    python -m bench.house.house --trace [--python PYTHON] [--tree DIR] [--label NAME] [--out FILE]
    python -m bench.house.house --page --out bench/results/house.jsonl  # house.md beside it
    python -m bench.house.house --limits [--tighten]  # this checkout's numbers beside their limits; 2 minutes

Counts come from syntax trees and tokens alone, so DIR may be a checkout of any commit; a trace runs DIR's
code, for which PYTHON has to be an interpreter that has that checkout installed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.harness.records import Recorder
from moe_lora.report.results import git_state, read_results, write_text

from .house_trace import TRACE_METHOD, trace_requests
from .measures import ROOT, Limits, counts, limits_table, trace_counts
from .sources import FUNCTIONS, PARTS, Source, code_lines, cycles, imported, public_names, read_sources

LONG_FILE, LONG_FUNCTION = 400, 70
COUNT_METHOD = (
    "Python files only.  A line of code holds at least one token that is no comment, and belongs to no "
    "docstring (any statement that is only a string) and to no import statement; formatted by ruff with "
    "the settings of pyproject.toml.  Importers are files of moe_lora and cli that name the file in an "
    "import statement, at whatever depth, or in a table of lazy exports; __init__ files import but are "
    "not counted as imported.  Public: neither the name nor that of a class or module around it begins "
    "with an underscore.  Lengths of files and functions are lines from first to last.  A cycle is a "
    "largest set of files that reach each other by imports.  Class and file names, importers and cycles "
    "are those of moe_lora and cli."
)


def _named(tree: ast.Module, kinds: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    named: Iterable[Any] = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return ((node.name, node) for node in named)


def count(tree: Path) -> dict[str, Any]:
    """All numbers of a checkout: per part, and of moe_lora with cli as a whole."""
    sources = read_sources(tree)
    parts = {part: [one for one in sources.values() if one.path.startswith(f"{part}/")] for part in PARTS}
    package = [*parts["moe_lora"], *parts["cli"]]
    edges = {one.module: imported(one, sources, deferred=True) for one in package}
    importers = Counter(target for targets in edges.values() for target in targets)
    single = [one.path for one in package if not one.is_package and importers[one.module] == 1]
    at_import = {one.module: imported(one, sources, deferred=False) for one in package}
    return {
        "parts": {part: _part(files) for part, files in parts.items()},
        "files_with_one_importer": sorted(single),
        "files_with_one_importer_moe_lora": sum(path.startswith("moe_lora/") for path in single),
        "cycles_at_import": cycles(at_import),
        "cycles_with_deferred_imports": cycles(edges),
        "class_names_twice": _twice(
            (name, one.path) for one in package for name, _ in _named(one.tree, ast.ClassDef)
        ),
        "file_names_twice": _twice((Path(one.path).stem, one.path) for one in package if not one.is_package),
    }


def _part(files: list[Source]) -> dict[str, Any]:
    public: Counter[str] = Counter()
    for source in files:
        for kind, documented in public_names(source):
            public[f"public_{kind}_{'documented' if documented else 'undocumented'}"] += 1
    long_functions = [
        f"{one.path}:{name} ({node.end_lineno - node.lineno + 1})"
        for one in files
        for name, node in _named(one.tree, FUNCTIONS)
        if node.end_lineno - node.lineno + 1 > LONG_FUNCTION
    ]
    lengths = {one.path: len(one.text.splitlines()) for one in files}
    return {
        "code_lines": sum(code_lines(one) for one in files),
        "files": len(files),
        **{
            f"public_{kind}_{how}": public[f"public_{kind}_{how}"]
            for kind in ("class", "function", "method")
            for how in ("documented", "undocumented")
        },
        "long_files": [f"{path} ({lines})" for path, lines in sorted(lengths.items()) if lines > LONG_FILE],
        "long_functions": sorted(long_functions),
    }


def _twice(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in pairs:
        places[name].append(path)
    return {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}


def page(records: list[dict[str, Any]]) -> str:
    """house.md: a column per label, in the order of the records; of records of one label the last counts."""
    counts = {one["config"]["label"]: one for one in records if one["config"]["what"] == "counts"}
    traces = {one["config"]["label"]: one for one in records if one["config"]["what"] == "trace"}
    labels = list(dict.fromkeys([*counts, *traces]))
    lines = [
        "# The house in numbers",
        "",
        "Written by `python -m bench.house.house --page` from `house.jsonl`.",
        "",
    ]
    lines += ["## Size and division", "", _row("", labels), _row("---", ["---:"] * len(labels))]
    rows = {label: _count_rows(one["result"]) for label, one in counts.items()}
    lines += _table(rows, labels)
    lines += [_row("commit", [_commit(counts.get(label)) for label in labels]), "", COUNT_METHOD, ""]
    lines += ["## What a request enters", "", _row("", labels), _row("---", ["---:"] * len(labels))]
    rows = {label: _trace_rows(one["result"]) for label, one in traces.items()}
    lines += _table(rows, labels)
    lines += [_row("commit", [_commit(traces.get(label)) for label in labels]), ""]
    for method in dict.fromkeys(one["config"]["method"] for one in traces.values()):
        alike = [label for label, one in traces.items() if one["config"]["method"] == method]
        lines += [f"{', '.join(alike)}: {method}", ""]
    for label, one in counts.items():
        lines += _lists(label, one["result"])
    return "\n".join(lines).rstrip() + "\n"


def _row(name: str, cells: Iterable[Any]) -> str:
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _table(rows: dict[str, dict[str, Any]], labels: list[str]) -> list[str]:
    names = dict.fromkeys(name for found in rows.values() for name in found)
    return [_row(name, [rows.get(label, {}).get(name, "") for label in labels]) for name in names]


def _commit(record: dict[str, Any] | None) -> str:
    return record["config"]["tree_commit"][:10] if record else ""


def _count_rows(result: dict[str, Any]) -> dict[str, Any]:
    parts = result["parts"]
    rows: dict[str, Any] = {"code lines, all": sum(one["code_lines"] for one in parts.values())}
    rows |= {f"code lines, {part}": one["code_lines"] for part, one in parts.items()}
    rows |= {f"files, {part}": one["files"] for part, one in parts.items()}
    rows["files of moe_lora with exactly one importer"] = result["files_with_one_importer_moe_lora"]
    for kind in ("class", "function", "method"):
        for how in ("documented", "undocumented"):
            key = f"public_{kind}_{how}"
            words = f"public {kind}{'es' if kind == 'class' else 's'}, {how}"
            rows[f"{words}, moe_lora and cli"] = parts["moe_lora"][key] + parts["cli"][key]
    for key, words in (
        ("long_files", f"files over {LONG_FILE} lines"),
        ("long_functions", f"functions over {LONG_FUNCTION} lines"),
    ):
        rows[f"{words}, moe_lora and cli"] = len(parts["moe_lora"][key]) + len(parts["cli"][key])
        rows[f"{words}, bench and demo"] = len(parts["bench"][key]) + len(parts["demo"][key])
    rows["class names that stand more than once"] = len(result["class_names_twice"])
    rows["file names that stand more than once"] = len(result["file_names_twice"])
    rows["cycles among files at import"] = len(result["cycles_at_import"])
    rows["cycles with deferred and type-checking imports"] = len(result["cycles_with_deferred_imports"])
    return rows


def _trace_rows(result: dict[str, Any]) -> dict[str, Any]:
    rows = {}
    for window, words in (
        ("completion", "warm completion of 3 tokens"),
        ("load", "load of an adapter"),
        ("first_completion", "first completion after it"),
    ):
        found = result["windows"][window]
        rows[f"{words}: files, functions"] = f"{found['num_files']}, {found['num_functions']}"
        if "num_files_not_idle" in found:  # a record of the method before
            rows[f"{words}: of these not seen while idle"] = (
                f"{found['num_files_not_idle']}, {found['num_functions_not_idle']}"
            )
        for process, numbers in found["processes"].items():
            rows[f"{words}: {process}"] = f"{numbers['num_files']}, {numbers['num_functions']}"
    idle = result["windows"]["idle"]
    rows["idle: files, functions"] = f"{idle['num_files']}, {idle['num_functions']}"
    return rows


def _lists(label: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## Lists: {label}", "", "Class names that stand more than once:", ""]
    lines += [f"- {name}: {', '.join(places)}" for name, places in result["class_names_twice"].items()]
    lines += ["", "File names that stand more than once:", ""]
    lines += [f"- {name}: {', '.join(places)}" for name, places in result["file_names_twice"].items()]
    for key, words in (
        ("long_files", f"Files over {LONG_FILE} lines"),
        ("long_functions", f"Functions over {LONG_FUNCTION} lines"),
    ):
        found = [one for part in result["parts"].values() for one in part[key]]
        lines += ["", f"{words}:", "", *(f"- {one}" for one in found)]
    for key, words in (
        ("cycles_at_import", "Cycles at import"),
        ("cycles_with_deferred_imports", "Cycles with deferred and type-checking imports"),
    ):
        lines += ["", f"{words}:", "", *(f"- {', '.join(group)}" for group in result[key])]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--label", help="the column's heading in house.md; default: the tree's commit")
    parser.add_argument("--out", type=Path, help="append the record to this file; default: print it")
    parser.add_argument("--trace", action="store_true", help="start a server and record what requests enter")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the tree installed")
    parser.add_argument("--page", action="store_true", help="write house.md beside --out and end")
    parser.add_argument("--limits", action="store_true", help="print each number beside its limit and end")
    parser.add_argument(
        "--tighten", action="store_true", help="with --limits: better numbers become the limits"
    )
    given = parser.parse_args()
    if given.tighten and not given.limits:
        parser.error("--tighten needs --limits, whose numbers become the limits")
    if given.limits and given.tree.resolve() != ROOT:
        parser.error(f"--limits counts the installed checkout, {ROOT}; leave out --tree")
    if given.limits:
        limits = Limits()
        values = {**counts(), **trace_counts(trace_requests(ROOT, sys.executable, generate_code=False))}
        print(limits_table(values, limits))
        if given.tighten:
            limits.tighten(values)
        return
    if given.page:
        if given.out is None:
            parser.error("--page needs --out, the file of records")
        write_text(given.out.with_suffix(".md"), page(read_results(given.out)))
        return
    record = Recorder(given.out)
    state = git_state(given.tree)
    config = {
        "bench": "house",
        "what": "trace" if given.trace else "counts",
        "label": given.label or str(state["git_commit"])[:10],
        "tree_commit": state["git_commit"],
        "tree_dirty": state["git_dirty"],
        "method": TRACE_METHOD if given.trace else COUNT_METHOD,
    }
    result = trace_requests(given.tree, given.python) if given.trace else count(given.tree)
    if given.out is None:
        rows = _trace_rows(result) if given.trace else _count_rows(result)
        print("\n".join(f"{name:<60} {value}" for name, value in rows.items()))
        return
    record(config, result)


if __name__ == "__main__":
    main()
