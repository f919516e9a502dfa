# SPDX-License-Identifier: Apache-2.0
"""docs/reference/python.md: signatures and docstrings of the library, from the code.

python -m bench.pages.python_api           # fails if the page differs
python -m bench.pages.python_api --write
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from bench.harness.records import ROOT
from moe_lora import api
from moe_lora.core.request import AdapterInfo, EngineStats, ModelInfo, TokenLogprobs

PAGE = ROOT / "docs/reference/python.md"
_TOP = """# Python interface

`LLM` is the whole engine in one process, without a server. `moe_lora.api` has every name below but the
results. `python -m bench.pages.python_api --write` makes this page; a test compares.

<!-- docstrings: moe_lora.api -->

```python
from moe_lora import LLM, SamplingParams

with LLM("demo/model", adapters={"upper": "demo/adapters/upper"}, eager=True) as llm:
    [answer] = llm.generate("hello=", adapter="upper", sampling=SamplingParams(max_tokens=8))
    print(answer.text)
    llm.publish_adapter("upper", "demo/adapters/reverse")
```
"""
RESULTS = (AdapterInfo, EngineStats, ModelInfo, TokenLogprobs)
"""Types of results."""
SETTINGS = "See [settings of `engine`](cluster_file.md): the fields are the same."
_LINE = 100


def page() -> str:
    """The page's text."""
    names = [name for name in api.__all__ if name != "EngineConfig"]
    parts = [_TOP, *(_object(getattr(api, name)) for name in names)]
    parts += ["## EngineConfig\n", SETTINGS + "\n", "## Results\n"]
    parts += [*(_object(one, level="###") for one in RESULTS), "<!-- end -->"]
    return "\n".join(parts).rstrip("\n") + "\n"


def _object(found: Any, level: str = "##") -> str:
    lines = [f"{level} {found.__name__}\n", *_documented(found)]
    if inspect.isclass(found) and not dataclasses.is_dataclass(found):
        for name, method in _methods(found):
            lines += [f"### {found.__name__}.{name}\n", *_documented(method)]
    return "\n".join(lines)


def _methods(found: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties; those of a private base once, with the base's first class."""
    shown = vars(found) if found is api.AsyncLLM else dict(inspect.getmembers(found))
    for name, member in shown.items():
        if name.startswith("_") or issubclass(found, Exception):
            continue
        if isinstance(member, property) or inspect.isfunction(member):
            yield name, member


def _documented(found: Any) -> list[str]:
    lines = [] if _is_error(found) else ["```python", _signature(found), "```"]
    text = inspect.getdoc(found) or ""
    if inspect.isclass(found) and text.startswith(f"{found.__name__}("):  # made by dataclass
        text = ""
    return [*lines, f"{_marked(text)}\n"] if text else [*lines, ""]


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Exception)


def _signature(found: Any) -> str:
    if isinstance(found, property):
        getter = found.fget
        assert getter is not None
        return f"{getter.__name__}: {inspect.signature(getter).return_annotation}"
    signature = inspect.signature(found)
    parts, has_marker = [], False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not has_marker:
            parts.append("*")
            has_marker = True
        parts.append(re.sub(r"'(.+?)'", r"\1", str(one)))
    result = "" if signature.return_annotation in (inspect.Signature.empty, None) else _result(signature)
    line = f"{found.__name__}({', '.join(parts)}){result}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{found.__name__}(", *(f"    {part}," for part in parts), f"){result}"])


def _result(signature: inspect.Signature) -> str:
    kind = signature.return_annotation
    return f" -> {kind if isinstance(kind, str) else kind.__name__}"


def _marked(text: str) -> str:
    """The docstring as Markdown: names of parameters at a sentence's start are code."""
    text = re.sub(r"  +", " ", text.replace("*", "\\*"))
    return re.sub(r"(?m)(^|\. )([a-z]\w*(?:, [a-z]\w*)*): ", r"\1`\2`: ", text)


def main() -> None:
    found = page()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(found, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != found:
        raise SystemExit(f"{PAGE} differs from the code; run: python -m bench.pages.python_api --write")


if __name__ == "__main__":
    main()
