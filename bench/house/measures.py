# SPDX-License-Identifier: Apache-2.0
"""The house's numbers by name, and their limits in `tests/house_limits.json`.

A ratchet may only fall, a floor may only rise.  A budget rises by a stated number for a stated reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import interface, language, shape
from .sources import PACKAGE, code_lines, read_sources

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ROOT / "tests" / "house_limits.json"


class Measure(NamedTuple):
    """The meaning of a number, and the way back within its limit."""

    meaning: str
    way_out: str


_ATTACH = "attach the feature at start or at first need, so that a default request does not enter its files"
_CALL_LESS = "call fewer functions on this way; a function that only forwards can go"
_SHORTER = "name the thing that acts, and drop relative words and pronouns (CONTRIBUTING.md)"
_BUDGET = "delete code, or raise the budget in the commit of the capability, with its reason"
TRACE = {
    "completion_files": Measure("files that a warm completion enters", _ATTACH),
    "completion_functions": Measure("functions that a warm completion enters", _CALL_LESS),
    "load_files": Measure("files that a load of an adapter enters", _ATTACH),
    "load_functions": Measure("functions that a load of an adapter enters", _CALL_LESS),
    "idle_files": Measure("files that an idle server enters", "wait for an event instead of looking again"),
    "idle_functions": Measure(
        "functions that an idle server enters", "wait for an event instead of looking again"
    ),
    "front_end_modules": Measure(
        "own modules in the front end after a completion and a load", "import the module where it is needed"
    ),
    "engine_modules": Measure(
        "own modules in the engine after a completion and a load", "import the module where it is needed"
    ),
}
COUNTS = {
    "long_functions": Measure(
        f"functions over {shape.LONGEST_FUNCTION} lines outside Triton", "split the function"
    ),
    "functions_of_many_parameters": Measure(
        f"functions over {shape.MOST_PARAMETERS} parameters outside Triton",
        "pass finished parts; a tuple or object that the function takes apart counts as its fields",
    ),
    "engine_core_parameters": Measure("parameters of EngineCore", "pass finished parts"),
    "fan_out": Measure("most files that one file imports", "let the parts be built by their own folders"),
    "relative_words_per_1000": Measure("relative words per 1,000 words of code's prose", _SHORTER),
    "pronouns_per_1000": Measure("pronouns per 1,000 words of code's prose", _SHORTER),
    "prose_per_code_line": Measure(
        "words of docstrings and comments per code line", "drop sentences that name and type already say"
    ),
    "unreachable_files": Measure(
        "files that no command and no call of the library reaches", "move the file to bench or tests"
    ),
    "headings": Measure("comment headings inside files", "split the file, or drop the heading"),
    "control_verb_files": Measure(
        "files that a control verb is written into", "let one generic call carry the verb"
    ),
    "docs_words": Measure(
        "words of docs and bench/README.md without generated tables",
        "a guide is when, command, output, limits",
    ),
    "code_lines": Measure("code lines of moe_lora and cli", _BUDGET),
    "parts": Measure("files, their headings, and files of two subjects", "join fragments; " + _BUDGET),
    "single_importer_files": Measure(
        "files with one importer",
        "move the file's content to its importer, or raise the budget with a reason",
    ),
    "options": Measure("options of serve, hidden ones too", "leave it to a file's setting; " + _BUDGET),
    "settings": Measure("settings, as leaves of the cluster file", "derive the value; " + _BUDGET),
    "documented_names": Measure("public names with a docstring", "write the docstring"),
    "shaped_functions": Measure(
        "public tensor functions with a shape in the docstring", "state the shapes in the docstring"
    ),
    "compared_blocks": Measure(
        "code blocks with output that a test compares",
        "mark the block `console`, with `$ COMMAND` and its output",
    ),
}
MEASURES = {**TRACE, **COUNTS}


@dataclass(frozen=True)
class Found:
    """A measure's value, and the places behind the value."""

    value: float
    places: list[str] = field(default_factory=list)


def counts(tree: Path = ROOT) -> dict[str, Found]:
    """The measures without a server, of the installed checkout."""
    package = read_sources(tree, PACKAGE)
    parameters = shape.Parameters(package)
    fan_out, widest = shape.fan_out(package)
    divided = shape.divided_files(package)
    lines = sum(code_lines(one) for one in package.values())
    lists = {
        "long_functions": shape.long_functions(package),
        "functions_of_many_parameters": parameters.above(shape.MOST_PARAMETERS),
        "unreachable_files": shape.unreachable(package),
        "headings": [heading for one in package.values() for heading in shape.headings(one)],
        "control_verb_files": interface.control_verb_files(package),
        "single_importer_files": shape.single_importers(package),
        "options": interface.options(),
        "settings": interface.settings(),
    }
    explanations = [text for one in package.values() for text in language.explanations(one)]
    literals = [text for one in package.values() for text in language.sentences(one)]
    prose = language.count_prose([*explanations, *literals])
    docs = language.count_prose(
        language.page_prose(page.read_text(encoding="utf-8")) for page in language.pages(tree)
    )
    return {
        **{name: Found(len(places), places) for name, places in lists.items()},
        "engine_core_parameters": Found(parameters.of("EngineCore.__init__")),
        "fan_out": Found(fan_out, [widest]),
        "relative_words_per_1000": Found(prose.relative_per_1000),
        "pronouns_per_1000": Found(prose.pronouns_per_1000),
        "prose_per_code_line": Found(round(language.count_prose(explanations).num_words / lines, 2)),
        "docs_words": Found(docs.num_words),
        "code_lines": Found(lines),
        "parts": Found(shape.parts(package, divided), divided),
        "documented_names": Found(shape.documented_names(package)),
        "shaped_functions": Found(shape.shaped_functions(package)),
        "compared_blocks": Found(language.compared_blocks(tree)),
    }


def trace_counts(result: Mapping[str, Any]) -> dict[str, Found]:
    """The measures of a trace (`house_trace.trace_requests`)."""
    found = {}
    for kind in ("completion", "load", "idle"):
        window = result["windows"][kind]
        functions = window["functions"]
        files = sorted({one.partition(":")[0] for one in functions})
        found[f"{kind}_files"] = Found(window["num_files"], files)
        found[f"{kind}_functions"] = Found(window["num_functions"], functions)
    for process in ("front end", "engine"):
        modules = result["modules"][process]
        found[f"{process.replace(' ', '_')}_modules"] = Found(len(modules), modules)
    return found


class Limits:
    """The content of `house_limits.json`: {"ratchets": {measure: limit}, "floors": {measure: limit},
    "budgets": {measure: {"limit": number, "raises": [{"by": number, "reason": text}]}}}.
    """

    def __init__(self, path: Path = LIMITS) -> None:
        self._path = path
        self.content: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))

    def kind(self, name: str) -> str:
        """ratchets, floors or budgets."""
        return next(kind for kind, held in self.content.items() if name in held)

    def of(self, name: str) -> float:
        """The limit in force; of a budget with its raises."""
        held = self.content[self.kind(name)][name]
        if not isinstance(held, dict):
            return float(held)
        return float(held["limit"] + sum(one["by"] for one in held["raises"]))

    def room(self, name: str, value: float) -> float:
        """How far the value may still go; negative: past the limit."""
        room = self.of(name) - value
        return round(-room if self.kind(name) == "floors" else room, 2)

    def problem(self, name: str, found: Found) -> str | None:
        """The measure, its value, its limit and the way out; None if the limit holds."""
        if self.room(name, found.value) >= 0:
            return None
        least = "at least" if self.kind(name) == "floors" else "at most"
        return (
            f"{MEASURES[name].meaning}: {found.value:g}, {least} {self.of(name):g} is allowed "
            f"({name} of the {self.kind(name)} in {self._path.name}).  Way out: {MEASURES[name].way_out}.  "
            "`python -m bench.house.house --limits` shows each number."
            + "".join(f"\n  {place}" for place in found.places)
        )

    def tighten(self, values: Mapping[str, Found]) -> None:
        """Write each better value as the new limit, and keep the limits of worse values."""
        for name, found in values.items():
            room, held = self.room(name, found.value), self.content[self.kind(name)]
            if room > 0 and isinstance(held[name], dict):
                held[name]["limit"] = round(held[name]["limit"] - room, 2)
            elif room > 0:
                held[name] = found.value
        self._path.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")


def limits_table(values: Mapping[str, Found], limits: Limits) -> str:
    """A row per measure: value beside limit."""
    rows: Iterable[tuple[str, ...]] = (
        (
            name,
            f"{found.value:g}",
            f"{limits.of(name):g}",
            limits.kind(name).removesuffix("s"),
            "past the limit" if limits.room(name, found.value) < 0 else "",
        )
        for name, found in values.items()
    )
    lines = [("measure", "value", "limit", "kind", ""), *rows]
    return "\n".join(f"{a:<30} {b:>9} {c:>9}  {d:<8} {e}".rstrip() for a, b, c, d, e in lines)
