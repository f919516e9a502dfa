# SPDX-License-Identifier: Apache-2.0
"""Tables of settings in the docs, made from the classes.

    python -m bench.pages.setting_tables docs/*/*.md

Between `<!-- settings: SECTION -->` and `<!-- end -->` stands what a section of the cluster file may hold,
between `<!-- options: SECTION ... -->` and `<!-- end -->` the options of `moe-lora serve` of some sections,
between `<!-- vllm: HEADING -->` and `<!-- end -->` vLLM's options below that heading.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_lora.cli.settings import KINDS, default_text, rows
from moe_lora.cli.vllm_options import VLLM_OPTIONS
from moe_lora.config.front_end import LimitsConfig
from moe_lora.config.settings import Setting, meanings, settings_of

_OF_PAGES = {**KINDS, "limits": LimitsConfig}
_TABLE = re.compile(r"(<!-- (settings|options|vllm): ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def section_table(kind: Any) -> str:
    """What may stand in a section, with default and option, as a table in Markdown."""
    return _markdown(("field", "value", "default", "option of serve", ""), list(rows(kind)))


def option_table(*kinds: Any) -> str:
    """The options of some sections as a table in Markdown."""
    rows = [
        (f"`{one.rule.option}{_metavar(one)}`", one.rule.unset or default_text(one), meanings(kind)[name])
        for kind in kinds
        for name, one in settings_of(kind).items()
        if one.rule.option
    ]
    return _markdown(("option", "default", ""), rows)


def vllm_table(heading: str) -> str:
    """vLLM's options below one of the headings of --help-vllm, as a table in Markdown."""
    rows = [
        (", ".join(f"`{name}`" for name in one.names), one.here().replace("|", "\\|"))
        for one in VLLM_OPTIONS[heading]
    ]
    return _markdown(("option of vLLM", "here"), rows)


def with_tables(text: str) -> str:
    """The page with every table as the classes have it now."""

    def made(found: re.Match[str]) -> str:
        if found[2] == "vllm":
            return f"{found[1]}{vllm_table(found[3])}{found[4]}"
        kinds = [_OF_PAGES[name] for name in found[3].split()]
        table = section_table(*kinds) if found[2] == "settings" else option_table(*kinds)
        return f"{found[1]}{table}{found[4]}"

    return _TABLE.sub(made, text)


def _markdown(heads: tuple[str, ...], rows: list[Any]) -> str:
    lines: Iterator[tuple[str, ...]] = iter([heads, ("---",) * len(heads), *rows])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _metavar(one: Setting) -> str:
    return "" if bool in one.kinds else f" {one.rule.metavar or ('NAME' if str in one.kinds else 'N')}"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
